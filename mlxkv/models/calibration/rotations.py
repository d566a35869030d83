"""Measure how a model's keys turn with their position.

A token that sees itself alone computes the same at every position, but for what its keys are turned by: the model runs
on single tokens whose caches hold nothing and say that they are at position t. That is exact for every layer, family
and kind of RoPE, and reads no config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv.formats.calibration import rotary
from mlxkv.formats.calibration.rotary import Rotary
from mlxkv.models.hooks.probe import Place, leaves, put

ROWS = 32  # keys of each kv head that are compared
WITH_POSITIONS = ("KVCache", "RotatingKVCache", "ChunkedKVCache")
RESOLUTION = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


class PositionCache:
    """An empty cache that stands at position `offset` and keeps the keys that it is handed."""

    def __init__(self, offset: int):
        self.offset = offset
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """As they were handed over, for layers that read those of another."""
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        return None  # one token sees itself

    def empty(self) -> bool:
        return True


def rotations(
    model: nn.Module,
    make_cache: Callable[[], list],
    places: Iterable[Place],
    tokens: mx.array,
    longest: int,
) -> dict[Place, Rotary | None]:
    """Return how keys of the caches at `places` turn up to position `longest`; None where it is not as RoPE does.

    make_cache: the model's own. tokens: [ROWS] ids, of any text.
    """
    places = list(places)
    kept: dict[Place, dict[int, np.ndarray]] = {place: {} for place in places}
    dtypes = dict.fromkeys(places, mx.float32)
    for t in rotary.positions(longest):
        caches = make_cache()
        for place, cache in leaves(caches):
            if type(cache).__name__ in WITH_POSITIONS:
                put(caches, place, PositionCache(t))
        model(tokens[:, None], cache=caches)
        found = dict(leaves(caches))
        for place in places:
            keys = found[place].keys
            dtypes[place] = keys.dtype
            rows = keys.astype(mx.float32).reshape(-1, keys.shape[-1])
            kept[place][t] = np.array(rows)
    return {p: rotary.measured(kept[p], RESOLUTION[dtypes[p]]) for p in places}
