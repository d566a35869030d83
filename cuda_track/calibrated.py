"""The calibrated transforms of the layers of a model, from an artifact of either implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from cuda_track import transform
from cuda_track.transform import Transform
from mlxkv.artifact import SIDES, Basis, Calibration, Layer
from mlxkv.config import BALANCED, CALIBRATED, LEARNED, CacheConfig, Side

Kinds = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Rotations:
    """The transforms of one layer, of keys and of values: [D, D] or [G, D, D].

    digest: of the calibration. layer: its name there.
    """

    keys: Transform
    values: Transform
    digest: str = ""
    layer: str = ""

    def __deepcopy__(self, memo) -> Rotations:
        return self  # as constant as weights: copies of a cache share it

    def to(self, device: torch.device) -> Rotations:
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))


def of(calibration: Calibration, kinds: Kinds = (CALIBRATED, CALIBRATED)) -> dict[str, Rotations]:
    """The transforms of each layer. kinds: `CacheConfig.fitted`.

    Raises UserError for balanced or learned ones of a calibration that has none.
    """
    if BALANCED in kinds:
        calibration.check_balanced()
    if LEARNED in kinds:
        calibration.check_learned()
    out = {}
    for name, layer in calibration.layers.items():
        bases = zip(kinds, (layer.keys, layer.values), strict=True)
        sides = (_made(kind, basis, calibration.parts) for kind, basis in bases)
        out[name] = Rotations(*sides, calibration.digest, name)
    return out


def _made(kind: str, basis: Basis, parts: str) -> Transform:
    if kind == CALIBRATED:
        down = basis.rotation(parts)
        return _pair(down, down.swapaxes(-1, -2))
    # A learned map ends with the mixing that it was learned behind: none comes after it.
    return _pair(*basis.balance.pair(parts if kind == BALANCED else "u"))


def _pair(down: np.ndarray, up: np.ndarray) -> Transform:
    """[1, D, D] serves all heads."""
    return transform.of(*(x[0] if len(x) == 1 else x for x in (down, up)))


def clipped(config: CacheConfig, layer: Layer, dims: tuple[int, int]) -> CacheConfig:
    """`config` with the clips that were searched for this layer."""

    def side(name: str, dim: int) -> Side:
        mine: Side = getattr(config, name)
        if not mine.searchable:
            return mine
        clip = getattr(layer, name).clips.get(mine.format(dim, config.page))
        return mine if clip is None else mine.clipped(clip)

    keys, values = (side(name, dim) for name, dim in zip(SIDES, dims, strict=True))
    return replace(config, keys=keys, values=values)
