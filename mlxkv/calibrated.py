"""The calibrated transforms of a layer at work, and where a saved cache finds them again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from weakref import WeakSet, WeakValueDictionary

import mlx.core as mx
import numpy as np

from mlxkv import artifact, rotation, subspace
from mlxkv.artifact import SIDES, Basis, Calibration, Layer
from mlxkv.config import BALANCED, CALIBRATED, LEARNED, PCA, CacheConfig
from mlxkv.errors import UserError
from mlxkv.formats_lowrank import LEAST, LowRank
from mlxkv.transform import Transform

Kinds = tuple[str, str]
ROTATED: Kinds = (CALIBRATED, CALIBRATED)


@dataclass(frozen=True, eq=False)
class Rotations:
    """The transforms of one layer: of keys and of values, [D, D] or [G, D, D], or of lower rank.

    digest: of the calibration, "" for none. layer: its name there. kinds: of keys and values, "oscar",
    "balanced" or "learned". folded: the weights of the model turn values already, so a cache is handed them in
    the stored domain and stores them as they come.
    """

    keys: Transform
    values: Transform
    digest: str = ""
    layer: str = ""
    kinds: Kinds = ROTATED
    folded: bool = False

    def check(self, heads: int) -> None:
        """Raises UserError unless these are for so many kv heads."""
        for side in (self.keys, self.values):
            if side.down.ndim == 3 and side.down.shape[0] != heads:
                raise UserError(
                    f"[attach] this calibration has maps of {side.down.shape[0]} kv heads; got {heads}, "
                    "as of a model that was spread over processes (model.shard); attach with "
                    "group=, or choose a preset without calibration, such as int4"
                )

    def __deepcopy__(self, memo):
        return self  # as constant as weights: copies of a cache share it


Key = tuple[str, str, Kinds, bool]  # digest, layer, kinds, folded
_at_hand: WeakValueDictionary[Key, Rotations] = WeakValueDictionary()


def of(
    calibration: Calibration, kinds: Kinds = ROTATED, names: Iterable[str] | None = None
) -> dict[str, Rotations]:
    """The transforms of each layer, or of those with these `names`; all caches of a model share them.
    kinds: `CacheConfig.fitted`.

    Raises UserError for balanced or learned ones of a calibration that has none.
    """
    if BALANCED in kinds or any(kind.startswith(PCA) for kind in kinds):
        calibration.check_balanced()
    if LEARNED in kinds:
        calibration.check_learned()
    out, parts = {}, calibration.parts
    for name in calibration.layers if names is None else names:
        layer = calibration.layers[name]
        key = (calibration.digest, name, kinds, False)
        made = _at_hand.get(key)
        if made is None:
            sides = (
                _leading(kind, layer, side) if kind.startswith(PCA) else _made(kind, basis, parts)
                for kind, side, basis in zip(kinds, SIDES, (layer.keys, layer.values), strict=True)
            )
            made = _at_hand[key] = Rotations(*sides, *key)
        out[name] = made
    return out


def _made(kind: str, basis: Basis, parts: str) -> Transform:
    if kind == CALIBRATED:
        return _turn(basis.rotation(parts))
    # A learned map ends with the mixing that it was learned behind: none comes after it.
    return _pair(*basis.balance.pair(parts if kind == BALANCED else "u"))


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


def _leading(kind: str, layer: Layer, side: str) -> Transform:
    """`kind`: as `Side.kind` writes it."""
    _, size, *mixed = kind.split()
    both = moment(layer, side)
    share = float(size)
    rank = int(size) if size.isdigit() else LowRank(share).dims(both.shape[-1])
    return _turn(subspace.basis(both, rank, bool(mixed)))


def folded(rotations: Rotations, yes: bool = True) -> Rotations:
    """The same rotations for weights that turn values, or do not."""
    if rotations.folded == yes:
        return rotations
    if not rotations.digest:  # of no calibration: nobody else may share them
        return replace(rotations, folded=yes)
    key = (rotations.digest, rotations.layer, rotations.kinds, yes)
    made = _at_hand.get(key)
    if made is None:
        made = _at_hand[key] = replace(rotations, folded=yes)
    return made


def cut(rotations: Rotations, rank: int, size: int) -> Rotations:
    """Those of the kv heads that the `rank`-th of `size` processes has, where `model.shard` of mlx-lm
    gives each an equal run of them. Raises UserError where they cannot be shared evenly."""
    sides = []
    for side in (rotations.keys, rotations.values):
        heads = side.down.shape[0] if side.down.ndim == 3 else size
        if heads % size:
            raise UserError(
                f"[attach] {heads} kv heads of {rotations.layer} cannot be shared by {size} "
                "processes; choose a number that divides them"
            )
        mine = slice(rank * heads // size, (rank + 1) * heads // size)
        whole = side.down.ndim == 2
        sides.append(side if whole else Transform(side.down[mine], side.up[mine]))
    digest = rotations.digest and f"{rotations.digest} {rank} of {size}"
    key = (digest, rotations.layer, rotations.kinds, rotations.folded)
    made = _at_hand.get(key) if digest else None
    if made is None:
        made = Rotations(*sides, *key)
        if digest:
            _at_hand[key] = made
    return made


@dataclass(eq=False)
class Attached:
    """A model that is attached: by `_place`, whether its weights turn the values. number: counts
    attachments."""

    folded: dict[tuple[str, str, str], bool]
    number: int


_attached: WeakSet[Attached] = WeakSet()  # a model that is gone does not count
_changes = count(1)
_now = 0  # changes with every attachment and every detachment


def enter(many: Iterable[Rotations]) -> Attached:
    """A model whose caches have these rotations was attached. Keep what is returned until then."""
    made = Attached({_place(one): one.folded for one in many}, _change())
    _attached.add(made)
    return made


def _place(one: Rotations) -> tuple[str, str, str]:
    """What its values are turned by: (digest, layer, kind)."""
    return one.digest, one.layer, one.kinds[1]


def leave(attached: Attached) -> None:
    """It was detached."""
    _attached.discard(attached)
    _change()


def _change() -> int:
    global _now
    _now = next(_changes)
    return _now


def changes() -> int:
    """Only after this has changed `as_attached` may answer anew."""
    return _now


def as_attached(rotations: Rotations, loaded: bool = False) -> Rotations:
    """The same rotations, folded or not as the models do that are attached now.

    A cache may outlive an attachment, and a file may come from another one. Where models of both
    kinds are attached `rotations` stay as they are; those of a cache that was `loaded` follow the
    last that was attached. Without any model of this calibration no weights are folded.
    """
    key = _place(rotations)
    found = [one for one in _attached if key in one.folded]
    kinds = {one.folded[key] for one in found}
    if rotations.folded in kinds and not loaded:
        return rotations
    last = max(found, key=lambda one: one.number, default=None)
    return folded(rotations, last is not None and last.folded[key])


def find(digest: str, layer: str, folds: bool = False, kinds: Kinds = ROTATED) -> Rotations:
    """The transforms that a saved cache names. Raises UserError if they are not on this machine."""
    if (made := _at_hand.get((digest, layer, kinds, folds))) is not None:
        return made
    if (made := _at_hand.get((digest, layer, kinds, not folds))) is not None:
        return folded(made, folds)
    calibration = artifact.with_digest(digest)
    if calibration is None or layer not in calibration.layers:
        raise UserError(
            f"[CompressedKVCache] this cache needs the calibration it was stored with; got none "
            f"with digest {digest}; load its model with that file (--calibration FILE) first"
        )
    return folded(of(calibration, kinds)[layer], folds)


@lru_cache(maxsize=8)
def sample(heads: int, dims: tuple[int, int], kinds: Kinds = ROTATED) -> Rotations:
    """Random transforms for heads of (key, value) dims, where a kernel is tried or timed."""
    return Rotations(*map(_random, kinds, (heads, heads), dims), kinds=kinds)


def _random(kind: str, heads: int, dims: int) -> Transform:
    turn = rotation.random_basis(heads, dims, dims)
    if kind.startswith(PCA):
        size = kind.split()[1]
        rank = int(size) if size.isdigit() else LowRank(float(size)).dims(dims)
        return _turn(turn[..., :rank])
    if kind == CALIBRATED:
        return _turn(turn)
    # Stretched by up to 2 either way between two rotations: `up` is far from the transpose.
    stretch = 2 ** np.linspace(-1, 1, dims)
    other = rotation.random_basis(heads, dims, dims + 1)
    return _pair(turn * stretch @ other, other.swapaxes(-1, -2) / stretch @ turn.swapaxes(-1, -2))


def _turn(down: np.ndarray) -> Transform:
    """Of R: [G, D, D] (or [G, D, R]), or [1, D, D] for all heads."""
    return _pair(down, down.swapaxes(-1, -2))


def _pair(down: np.ndarray, up: np.ndarray) -> Transform:
    """Of a map and its inverse, as above."""
    both = (x[0] if len(x) == 1 else x for x in (down, up))
    return Transform(*(mx.array(np.ascontiguousarray(x.astype(np.float32))) for x in both))
