"""What a calibration says of one layer: its matrices, ranks and clips. NumPy; no framework is imported here.

Letters: `G` kv heads, `D` head dim, `R` stored dims.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlxkv.errors import UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance, subspace
from mlxkv.formats.calibration.artifact import SIDES, Basis, Calibration, Layer
from mlxkv.formats.config import (
    BALANCED,
    CALIBRATED,
    CENTRED,
    LEARNED,
    PCA,
    SCALED,
    SHARED,
    CacheConfig,
)
from mlxkv.formats.lowrank import LEAST, LowRank

Kinds = tuple[str, str]  # of keys and values: `CacheConfig.fitted`
Pair = tuple[np.ndarray, np.ndarray]  # down and up: [G or 1, D, R] and [G or 1, R, D]


def check_kinds(calibration: Calibration, kinds: Kinds) -> None:
    """Raise UserError if the calibration lacks the maps of these kinds."""
    if kinds[0] in CENTRED:
        calibration.check_centred()
        kinds = CENTRED[kinds[0]], kinds[1]
    if BALANCED in kinds or any(kind.startswith(PCA) for kind in kinds):
        calibration.check_balanced()
    if SCALED in kinds:
        calibration.check_scaled()
    if LEARNED in kinds:
        calibration.check_learned()


def pairs(calibration: Calibration, kinds: Kinds, name: str) -> tuple[Pair, Pair]:
    """The maps (down, up) of keys and of values of the layer `name`."""
    layer, parts = calibration.layers[name], calibration.parts
    return tuple(
        _leading(kind, layer, side) if kind.startswith(PCA) else _mapped(kind, layer, side, parts)
        for kind, side in zip(kinds, SIDES, strict=True)
    )


def _mapped(kind: str, layer: Layer, side: str, parts: str) -> Pair:
    basis = getattr(layer, side)
    if CENTRED.get(kind) == BALANCED:
        return _balanced_about_mean(basis, parts)
    if (
        CENTRED.get(kind, kind) == CALIBRATED
    ):  # made of queries alone: a mean of keys changes nothing
        return _orthogonal(basis.rotation(parts))
    if kind == SHARED:
        return _orthogonal(matrices.compose(shared_vectors(basis), parts).astype(np.float32))
    if kind == SCALED:
        return scaled(channel_scale(basis.peaks))
    # A learned map ends with the mixing that it was learned behind: none comes after it.
    return basis.balance.pair(parts if kind == BALANCED else "u")


def _balanced_about_mean(basis: Basis, parts: str) -> Pair:
    """The balanced maps of keys without their mean, from the moments that a calibration holds."""
    noise = balance.about_mean(subspace.stored_moment(basis.balance), basis.mean.astype(np.float64))
    reads = subspace.read_moment(basis.values, basis.vectors)
    return balance.mixed(balance.balance(noise, reads)[0], parts)


def key_mean(calibration: Calibration, kinds: Kinds, name: str) -> np.ndarray | None:
    """The mean [G, D] float32 that is taken from the keys of the layer `name`; None for none."""
    return calibration.layers[name].keys.mean if kinds[0] in CENTRED else None


def shared_vectors(basis: Basis) -> np.ndarray:
    """Eigenvectors [1, D, D] of the mean moment of a layer's kv heads, as OSCAR's first release rotates."""
    moments = subspace.read_moment(basis.values, basis.vectors)
    return matrices.eigenbasis(moments.mean(0, keepdims=True))[1]


def channel_scale(peaks: np.ndarray) -> np.ndarray:
    """Return lambda [D] float64, 1 / the largest value of each channel of a layer's kv heads, of `peaks`
    [G or 1, D] (SRFT paper, section 7.1)."""
    return 1.0 / peaks.astype(np.float64).max(0)


def scaled(scale: np.ndarray) -> Pair:
    """The maps [1, D, D] of SRFT with a scale [D] per channel after it (SRFT paper, section 7.1)."""
    down = matrices.srft(len(scale))
    return (down * scale)[None], (down.T / scale[:, None])[None]


def _leading(kind: str, layer: Layer, side: str) -> Pair:
    """The leading directions of a side; kind: as `Side.kind` writes it."""
    _, size, *mixed = kind.split()
    both = moment(layer, side)
    rank = int(size) if size.isdigit() else LowRank(float(size)).dims(both.shape[-1])
    return _orthogonal(subspace.basis(both, rank, bool(mixed)))


def _orthogonal(down: np.ndarray) -> Pair:
    return down, down.swapaxes(-1, -2)


def share(heads: int, rank: int, size: int, layer: str) -> slice:
    """The kv heads of the `rank`-th of `size` processes, each with an equal run of them. Raises UserError."""
    if heads % size:
        raise UserError(
            f"[attach] {heads} kv heads of {layer} cannot be shared by {size} processes; choose a number "
            "that divides them"
        )
    return slice(rank * heads // size, (rank + 1) * heads // size)


def moment(layer: Layer, side: str) -> np.ndarray:
    """[G, D, D] whose leading directions are the basis of a side: queries and keys stacked, each kind
    with the same weight (OjaKV, A.2), or values. For layers that hold balanced transforms."""
    basis = getattr(layer, side)
    stored = subspace.stored_moment(basis.balance)
    if side == "values":
        return stored
    return stored + subspace.read_moment(basis.values, basis.vectors)


def with_ranks(config: CacheConfig, layer: Layer) -> CacheConfig:
    """`config` with the rank that the requested energy takes in this layer: the largest of its kv heads,
    even."""
    sides = {}
    for name in SIDES:
        side = getattr(config, name)
        if side.low is not None and side.low.energy:
            both = moment(layer, name)
            rank = max(LEAST, int(subspace.ranks(both, side.low.energy).max()))
            rank = min(rank + rank % 2, both.shape[-1])
            side = replace(side, low=replace(side.low, energy=0.0, rank=rank))
        sides[name] = side
    return replace(config, **sides)


def with_clips(config: CacheConfig, layer: Layer) -> CacheConfig:
    """`config` with the clips that were searched for its formats in this layer, if there are any."""
    sides = {}
    for name in SIDES:
        side, basis = getattr(config, name), getattr(layer, name)
        if side.searchable:
            form = side.format(basis.values.shape[1], config.page)
            side = side.clipped(basis.clips.get(form, side.quantizer.clip))
        sides[name] = side
    return replace(config, **sides)
