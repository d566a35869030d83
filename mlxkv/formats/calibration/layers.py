"""Matrices, ranks and clips of one layer from a calibration. NumPy; imports no framework.

Letters: `G` kv heads, `D` head dim, `R` stored dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mlxkv.errors import UserError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance, mixed_bits, subspace
from mlxkv.formats.calibration.artifact import SIDES, Basis, Calibration, Kinds, Layer
from mlxkv.formats.config import (
    BALANCED,
    CALIBRATED,
    CENTRED,
    MIXED_BITS,
    PCA,
    SCALED,
    SHARED,
    CacheConfig,
)
from mlxkv.formats.lowrank import LEAST, LowRank

Pair = tuple[np.ndarray, np.ndarray]  # down and up: [G or 1, D, R] and [G or 1, R, D]


def is_centred(kind: str) -> bool:
    """Return whether a mean is subtracted before storing."""
    return kind.split()[0] in CENTRED


def pairs(calibration: Calibration, kinds: Kinds, name: str) -> tuple[Pair, Pair]:
    """Return the maps (down, up) of keys and of values of the layer `name`."""
    layer = calibration.layers[name]
    keys, values = (
        _leading(kind, layer, side) if kind.startswith(PCA) else _mapped(kind, layer, side)
        for kind, side in zip(kinds, SIDES, strict=True)
    )
    return keys, values


def _mapped(kind: str, layer: Layer, side: str) -> Pair:
    basis = getattr(layer, side)
    name, _, size = kind.partition(" ")
    if CENTRED.get(name, name) == MIXED_BITS:
        if not size:
            raise UserError(
                f"[calibration] mixed bits have no widths yet; got {name}; choose a config of `layers.fitted`"
            )
        widths = tuple(int(bits) for bits in size.split(","))
        return mixed_bits.pair(*directions(basis, is_centred(kind)), widths)
    if CENTRED.get(kind) == BALANCED:
        return balance.mixed(directions(basis, True)[0])
    if (
        CENTRED.get(kind, kind) == CALIBRATED
    ):  # made of queries alone: a mean of keys changes nothing
        return _orthogonal(basis.rotation())
    if kind == SHARED:
        return _orthogonal(
            matrices.compose(shared_vectors(basis.values, basis.vectors)).astype(np.float32)
        )
    if kind == SCALED:
        return scaled(channel_scale(basis.peaks))
    # A learned map ends with the mixing that it was learned behind: none comes after it.
    return basis.balance.mixed() if kind == BALANCED else basis.balance.pair()


def directions(basis: Basis, centred: bool) -> Pair:
    """Return the balanced map [G, D, D] and sigma [G, D], falling.

    centred: for keys without their mean, and if the calibration has them, for queries weighted mostly by the cost of
    errors in their scores.
    """
    if not centred:
        return basis.balance.down, basis.balance.sigma
    assert basis.mean is not None  # keys have one
    noise = balance.about_mean(subspace.stored_moment(basis.balance), basis.mean.astype(np.float64))
    reads = basis.queries
    if reads is None:
        reads = subspace.read_moment(basis.values, basis.vectors)
    return balance.balance(noise, reads)[:2]


def key_mean(calibration: Calibration, kinds: Kinds, name: str) -> np.ndarray | None:
    """Return the mean [G, D] float32 subtracted from the keys of layer `name`, or None."""
    return calibration.layers[name].keys.mean if is_centred(kinds[0]) else None


def shared_vectors(values: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return eigenvectors [1, D, D] of the mean moment of a layer's kv heads, of those of each head (`Basis`), as
    OSCAR's first release rotates."""
    moments = subspace.read_moment(values, vectors)
    return matrices.eigenbasis(moments.mean(0, keepdims=True))[1]


def channel_scale(peaks: np.ndarray) -> np.ndarray:
    """Return lambda [D] float64, 1 / the largest value of each channel of a layer's kv heads, of `peaks`
    [G, D] (SRFT paper, section 7.1)."""
    return 1.0 / peaks.astype(np.float64).max(0)


def scaled(scale: np.ndarray) -> Pair:
    """Return the maps [1, D, D] of SRFT with a scale [D] per channel after it (SRFT paper, section 7.1)."""
    down = matrices.srft(len(scale))
    return (down * scale)[None], (down.T / scale[:, None])[None]


def _leading(kind: str, layer: Layer, side: str) -> Pair:
    """Return the leading directions of a side; kind: as `Side.kind` writes it."""
    _, size, *mixed = kind.split()
    second_moment = moment(layer, side)
    rank = int(size) if size.isdigit() else LowRank(float(size)).dims(second_moment.shape[-1])
    return _orthogonal(subspace.basis(second_moment, rank, bool(mixed)))


def _orthogonal(down: np.ndarray) -> Pair:
    return down, down.swapaxes(-1, -2)


def share(heads: int, rank: int, size: int, layer: str) -> slice:
    """Return the kv heads of the `rank`-th of `size` processes, each with an equal run of them. Raises UserError."""
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


def fitted(configs: Mapping[str, CacheConfig], calibration: Calibration) -> dict[str, CacheConfig]:
    """Return each layer's config, by name, with the calibration's ranks, bits of directions and clips.

    Raises UserError if too few bits are requested, or the calibration lacks something.
    """
    layers = calibration.layers
    ranked = {name: with_ranks(config, layers[name]) for name, config in configs.items()}
    mixed = with_widths(ranked, calibration)
    return {name: with_clips(config, layers[name]) for name, config in mixed.items()}


def with_widths(
    configs: Mapping[str, CacheConfig], calibration: Calibration
) -> dict[str, CacheConfig]:
    """Return `configs` by layer with the bits of their directions, if not allotted yet.

    Sides of equal rate share a budget over all layers; keys and values of different rates have separate budgets.
    """
    budgets: dict[tuple[float] | tuple[float, str], list[tuple[str, str]]] = {}
    for name, config in configs.items():
        mixed = {side: getattr(config, side) for side in SIDES if getattr(config, side).mixed_bits}
        rates = [side.quantizer.rate for side in mixed.values()]
        for side, old in mixed.items():
            if not old.quantizer.widths:
                calibration.check_kinds(config.fitted)
                rate = old.quantizer.rate
                group = (rate,) if rates == [rate, rate] else (rate, side)
                budgets.setdefault(group, []).append((name, side))
    out = dict(configs)
    for (rate, *_), places in budgets.items():
        sides: list[tuple[str, np.ndarray]] = []
        for name, side in places:
            basis = getattr(calibration.layers[name], side)
            _, sigma = directions(basis, getattr(out[name], side).centred)
            sides.append((side, sigma.astype(np.float64)))
        exchange = [calibration.layers[name].costs(side) for name, side in places]
        allotted_widths = mixed_bits.allot(sides, rate, exchange)
        for (name, side), widths in zip(places, allotted_widths, strict=True):
            old = getattr(out[name], side)
            allotted = replace(old, quantizer=replace(old.quantizer, widths=widths))
            out[name] = replace(out[name], **{side: allotted})
    return out


def with_ranks(config: CacheConfig, layer: Layer) -> CacheConfig:
    """Return `config` with the rank that the requested energy needs in this layer: the largest of its heads, even."""
    sides = {}
    for name in SIDES:
        side = getattr(config, name)
        if side.low is not None and side.low.energy:
            second_moment = moment(layer, name)
            rank = max(LEAST, int(subspace.ranks(second_moment, side.low.energy).max()))
            rank = min(rank + rank % 2, second_moment.shape[-1])
            side = replace(side, low=replace(side.low, energy=0.0, rank=rank))
        sides[name] = side
    return replace(config, **sides)


def with_clips(config: CacheConfig, layer: Layer) -> CacheConfig:
    """Return `config` with the clips searched for its formats in this layer, if any."""
    sides = {}
    for name in SIDES:
        side, basis = getattr(config, name), getattr(layer, name)
        if side.searchable:
            form = side.format(basis.values.shape[1], config.page)
            side = side.clipped(basis.clips.get(form, side.quantizer.clip))
        sides[name] = side
    return replace(config, **sides)
