"""The calibrated transforms of a layer at work, and where a saved cache finds them again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from mlxkv import artifact, rotation
from mlxkv.artifact import Calibration
from mlxkv.errors import UserError
from mlxkv.transform import Transform


@dataclass(frozen=True, eq=False)
class Rotations:
    """The transforms of one layer: of keys and of values, [D, D] or [G, D, D].

    digest: of the calibration, "" for none. layer: its name there.
    """

    keys: Transform
    values: Transform
    digest: str = ""
    layer: str = ""

    def __deepcopy__(self, memo):
        return self  # as constant as weights: copies of a cache share it


_at_hand: WeakValueDictionary[tuple[str, str], Rotations] = WeakValueDictionary()


def of(calibration: Calibration) -> dict[str, Rotations]:
    """The rotations of each layer; all caches of a model share them."""
    out = {}
    for name, layer in calibration.layers.items():
        key = (calibration.digest, name)
        made = _at_hand.get(key)
        if made is None:
            sides = (_transform(x.rotation(calibration.parts)) for x in (layer.keys, layer.values))
            made = _at_hand[key] = Rotations(*sides, *key)
        out[name] = made
    return out


def find(digest: str, layer: str) -> Rotations:
    """The rotations that a saved cache names. Raises UserError if they are not on this machine."""
    if (made := _at_hand.get((digest, layer))) is not None:
        return made
    calibration = artifact.with_digest(digest)
    if calibration is None or layer not in calibration.layers:
        raise UserError(
            f"[CompressedKVCache] this cache needs the calibration it was stored with; got none "
            f"with digest {digest}; load its model with that file (--calibration FILE) first"
        )
    return of(calibration)[layer]


@lru_cache(maxsize=8)
def sample(heads: int, dims: tuple[int, int]) -> Rotations:
    """Random rotations for heads of (key, value) dims, where a kernel is tried or timed."""
    keys, values = (_transform(rotation.random_basis(heads, d, d)) for d in dims)
    return Rotations(keys, values)


def _transform(down: np.ndarray) -> Transform:
    """Of R: [G, D, D], or [1, D, D] for all heads."""
    down = down[0] if len(down) == 1 else down
    up = np.ascontiguousarray(down.swapaxes(-1, -2))
    return Transform(mx.array(down.astype(np.float32)), mx.array(up.astype(np.float32)))
