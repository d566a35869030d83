"""The calibrated transforms of the layers of a model, from an artifact of either implementation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuda_track import transform
from cuda_track.transform import Transform
from mlxkv import subspace
from mlxkv.artifact import SIDES, Basis, Calibration, Layer
from mlxkv.config import BALANCED, CALIBRATED, LEARNED, PCA, CacheConfig, Side
from mlxkv.formats_lowrank import LEAST, LowRank

Kinds = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Rotations:
    """The transforms of one layer, of keys and of values: [D, D] or [G, D, D], or of lower rank.

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

    def of_share(self, rank: int, size: int) -> Rotations:
        """Those of the kv heads in the `rank`-th of `size` equal shares."""
        if size == 1:
            return self
        return replace(self, **{name: getattr(self, name).of_share(rank, size) for name in SIDES})


def of(
    calibration: Calibration,
    kinds: Kinds = (CALIBRATED, CALIBRATED),
    names: Iterable[str] | None = None,
) -> dict[str, Rotations]:
    """The transforms of each layer, or of those with these `names`. kinds: `CacheConfig.fitted`.

    Raises UserError for balanced or learned ones of a calibration that has none.
    """
    if BALANCED in kinds or any(kind.startswith(PCA) for kind in kinds):
        calibration.check_balanced()
    if LEARNED in kinds:
        calibration.check_learned()
    out = {}
    for name in calibration.layers if names is None else names:
        layer = calibration.layers[name]
        sides = (
            _leading(kind, layer, side)
            if kind.startswith(PCA)
            else _made(kind, getattr(layer, side), calibration.parts)
            for kind, side in zip(kinds, SIDES, strict=True)
        )
        out[name] = Rotations(*sides, calibration.digest, name)
    return out


def moment(layer: Layer, side: str) -> np.ndarray:
    """[G, D, D] whose leading directions are the basis of a side: queries and keys stacked, each kind
    with the same weight (OjaKV, A.2), or values. For layers that hold balanced transforms."""
    basis = getattr(layer, side)
    stored = subspace.stored_moment(basis.balance)
    if side == "values":
        return stored
    return stored + subspace.read_moment(basis.values, basis.vectors)


def with_ranks(config: CacheConfig, layer: Layer) -> CacheConfig:
    """`config` with the rank that the energy asked for takes in this layer: the largest of its kv
    heads, even."""

    def side(name: str) -> Side:
        mine: Side = getattr(config, name)
        if mine.low is None or not mine.low.energy:
            return mine
        both = moment(layer, name)
        rank = max(LEAST, int(subspace.ranks(both, mine.low.energy).max()))
        rank = min(rank + rank % 2, both.shape[-1])
        return replace(mine, low=replace(mine.low, energy=0.0, rank=rank))

    return replace(config, **{name: side(name) for name in SIDES})


def _leading(kind: str, layer: Layer, side: str) -> Transform:
    """`kind`: as `Side.kind` writes it."""
    _, size, *mixed = kind.split()
    both = moment(layer, side)
    rank = int(size) if size.isdigit() else LowRank(float(size)).dims(both.shape[-1])
    down = subspace.basis(both, rank, bool(mixed))
    return _pair(down, down.swapaxes(-1, -2))


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
