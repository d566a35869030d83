"""The memory of a KV cache in figures, by one rule for `chat`, `serve` and `demo`.

In use: the bytes of the tokens that a cache holds: codes and scales of sealed pages, the exact tokens of the
windows and of the page that was sealed last, in the type in which they are stored; what a saved session
would hold. 16 bits: what caches without compression take for the same tokens in 16 bits, by the same rule
(a sliding window counts its window). Allocated: the arrays with their room to grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.console import human_bytes
from mlxkv.models.hooks.probe import leaves

BITS = 16  # of full precision
NOTHING_YET = "nothing compressed yet (exact up to {} tokens)"
NOTHING = "nothing compressed (full precision)"


@dataclass(frozen=True)
class Usage:
    """Figures of the caches of one sequence, or the sum of several.

    kv_bytes: in use. kv_bytes_fp16: the same tokens in 16 bits. allocated: with the room to grow. window:
    tokens that stay exact before the first page is sealed, of a preset that compresses; else 0. tokens: of
    the longest sequence.
    """

    tokens: int
    kv_bytes: int
    kv_bytes_fp16: int
    allocated: int
    window: int = 0

    @property
    def note(self) -> str | None:
        """Return why there are no bits to tell, or None."""
        if not self.window:
            return NOTHING
        if self.tokens <= self.window:
            return NOTHING_YET.format(self.window)
        if self._bits > BITS:  # such as windows in 32 bits, without a GPU
            return f"little compressed yet (exact up to {self.window} tokens)"
        return None

    @property
    def bits_per_value(self) -> float | None:
        """Bits in use for a number of the keys and values, windows included; None where `note` says why."""
        return None if self.note or not self.kv_bytes_fp16 else self._bits

    @property
    def _bits(self) -> float:
        return BITS * self.kv_bytes / self.kv_bytes_fp16 if self.kv_bytes_fp16 else 0.0

    @property
    def figures(self) -> dict:
        """The fields of `mlxkv chat --json`."""
        bits = self.bits_per_value
        return {
            "kv_bytes": self.kv_bytes,
            "kv_bytes_fp16": self.kv_bytes_fp16,
            "kv_bytes_allocated": self.allocated,
            "bits_per_value": None if bits is None else round(bits, 3),
            "kv_note": self.note,
        }

    def line(self) -> str:
        """'cache 5.1 MiB, 16 bits would be 9.8 MiB', or why nothing is compressed."""
        cache = f"cache {human_bytes(self.kv_bytes)}"
        if self.tokens <= self.window or not self.window:
            return f"{cache}, {self.note}"
        suffix = f" ({self.note})" if self.note else ""
        return f"{cache}, 16 bits would be {human_bytes(self.kv_bytes_fp16)}{suffix}"


def usage(caches: Sequence[Any]) -> Usage:
    """Measure the caches of one sequence, a layer each."""
    tokens = max((getattr(cache, "offset", 0) for _, cache in leaves(caches)), default=0)
    windows = (
        cache.config.window for _, cache in leaves(caches) if isinstance(cache, CompressedKVCache)
    )
    return Usage(
        tokens,
        sum(map(in_use, caches)),
        sum(map(in_16_bits, caches)),
        sum(cache.nbytes for cache in caches),
        max(windows, default=0),
    )


def window_of(loaded: Any) -> int:
    """Tokens that stay exact in a model that is attached, or 0 where no layer is compressed."""
    return loaded.kv.window if any(layer.compressed for layer in loaded.layers) else 0


def in_use(cache: Any) -> int:
    """Bytes of the tokens that one cache holds. Nothing is computed."""
    if (inner := getattr(cache, "caches", None)) is not None:
        return sum(map(in_use, inner))
    if isinstance(cache, CompressedKVCache):
        arrays = tree_flatten({name: x for name, x in cache.state.items() if name != "header"})
        return sum(x.nbytes for _, x in arrays)
    if (plain := _plain(cache)) is None:
        return cache.nbytes
    values, size, tokens = plain
    return values * size * tokens


def in_16_bits(cache: Any) -> int:
    """Bytes of the same tokens in a cache of 16 bits that does not compress."""
    if (inner := getattr(cache, "caches", None)) is not None:
        return sum(map(in_16_bits, inner))
    if isinstance(cache, CompressedKVCache):
        live = cache.live
        values = 0 if live is None else sum(x.shape[0] * x.shape[1] * x.shape[3] for x in live)
        return 2 * values * cache.offset
    if (plain := _plain(cache)) is None:
        return cache.nbytes  # a state of fixed size: compression changes nothing
    values, _, tokens = plain
    return 2 * values * tokens


def _plain(cache: Any) -> tuple[int, int, int] | None:
    """(numbers a token, bytes of a number, tokens kept) of mlx-lm's caches of keys and values [B, G, T, D];
    None for others."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not (isinstance(keys, mx.array) and isinstance(values, mx.array)) or keys.ndim != 4:
        return None
    numbers = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in (keys, values))
    limit = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
    tokens = min(cache.offset, limit) if limit else cache.offset
    return numbers, keys.dtype.size, tokens
