"""Calibrated transforms of each layer, and a registry by which saved caches find them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from mlxkv.codec import transform
from mlxkv.codec.transform import KeyMean, Transform
from mlxkv.errors import UserError
from mlxkv.formats import matrices
from mlxkv.formats.config import CALIBRATED, CENTRED, MIXED_BITS, PCA, SCALED, SHARED
from mlxkv.formats.lowrank import LowRank
from mlxkv.formats.quantizers import DIMS

if TYPE_CHECKING:  # calibrations are imported for calibrated presets only
    from mlxkv.formats.calibration.artifact import Calibration

Kinds = tuple[str, str]  # kinds of keys and of values

ROTATED: Kinds = (CALIBRATED, CALIBRATED)


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """Transforms of one layer's keys and values, [D, D] or [G, D, D], or of lower rank.

    digest: digest of the calibration, "" without one. layer: the layer's name in it. kinds: `Side.kind` of keys and
    values. folded: whether the model's weights already apply the value map, so that values arrive in the stored
    domain. key_mean: mean of keys, for centred kinds.
    """

    keys: Transform
    values: Transform
    digest: str = ""
    layer: str = ""
    kinds: Kinds = ROTATED
    folded: bool = False
    key_mean: KeyMean | None = None

    def check(self, heads: int) -> None:
        """Raise UserError unless the maps fit this number of kv heads."""
        counts = {len(side.down) for side in (self.keys, self.values) if side.down.ndim == 3}
        if self.key_mean is not None:
            counts.add(len(self.key_mean.mean))
        for count in counts:
            if count != heads:
                raise UserError(
                    f"[attach] this calibration has maps of {count} kv heads; got {heads}, "
                    "as of a model that was spread over processes (model.shard); attach with "
                    "group=, or choose a preset without calibration, such as int4"
                )

    def __deepcopy__(self, memo: dict[int, object]) -> LayerMaps:
        return self  # constant: copies of a cache share it

    def __reduce__(self) -> tuple[Callable[..., LayerMaps], tuple[object, ...]]:
        key = (self.digest, self.layer, self.kinds, self.folded)
        return _unpickled, (self.keys, self.values, self.key_mean, key)


Key = tuple[str, str, Kinds, bool]  # digest, layer, kinds, folded
_at_hand: WeakValueDictionary[Key, LayerMaps] = WeakValueDictionary()


def _shared(key: Key, make: Callable[[], LayerMaps]) -> LayerMaps:
    """Return the registered maps of `key`, or make them. Maps without a calibration are not shared."""
    if not key[0]:
        return make()
    layer_maps = _at_hand.get(key)
    if layer_maps is None:
        layer_maps = _at_hand[key] = make()
    return layer_maps


def _unpickled(keys: Transform, values: Transform, key_mean: KeyMean | None, key: Key) -> LayerMaps:
    """Unpickle maps: share registered ones, as copies do, else register these."""
    return _shared(key, lambda: LayerMaps(keys, values, *key, key_mean=key_mean))


def of(
    calibration: Calibration, kinds: Kinds = ROTATED, names: Iterable[str] | None = None
) -> dict[str, LayerMaps]:
    """Return the transforms of each layer, or of the layers `names`, shared by all caches of a model.

    kinds: `CacheConfig.fitted`. Raises UserError for kinds that the calibration lacks.
    """
    calibration.check_kinds(kinds)
    return {
        name: _shared(
            (calibration.digest, name, kinds, False), partial(_of_layer, calibration, kinds, name)
        )
        for name in (calibration.layers if names is None else names)
    }


def _of_layer(calibration: Calibration, kinds: Kinds, name: str) -> LayerMaps:
    from mlxkv.formats.calibration import layers
    from mlxkv.formats.calibration.artifact import SIDES

    layer = calibration.layers[name]
    sides: list[Transform] = []
    triples = zip(kinds, SIDES, layers.pairs(calibration, kinds, name), strict=True)
    for kind, side, pair in triples:
        if kind == SCALED:
            sides.append(_scaled(layers.channel_scale(getattr(layer, side).peaks)))
        else:
            sides.append(_pair(*pair))
    mean = layers.key_mean(calibration, kinds, name)
    key_mean = None if mean is None else _key_mean(mean)
    return LayerMaps(sides[0], sides[1], calibration.digest, name, kinds, key_mean=key_mean)


def folded(layer_maps: LayerMaps, yes: bool = True) -> LayerMaps:
    """Return the maps for weights that apply the value map (`yes`), or do not."""
    if layer_maps.folded == yes:
        return layer_maps
    key = (layer_maps.digest, layer_maps.layer, layer_maps.kinds, yes)
    return _shared(key, lambda: replace(layer_maps, folded=yes))


def cut(layer_maps: LayerMaps, rank: int, size: int) -> LayerMaps:
    """Return the maps of the kv heads of process `rank` of `size`.

    mlx-lm's `model.shard` assigns each process an equal, contiguous range of heads. Raises UserError if `size` does
    not divide the heads.
    """
    from mlxkv.formats.calibration import layers

    sides: list[Transform] = []
    key_mean = layer_maps.key_mean
    if key_mean is not None:
        part = layers.share(len(key_mean.mean), rank, size, layer_maps.layer)
        key_mean = KeyMean(key_mean.mean[part])
    for side in (layer_maps.keys, layer_maps.values):
        heads = side.down.shape[0] if side.down.ndim == 3 else size
        part = layers.share(heads, rank, size, layer_maps.layer)
        is_shared = side.down.ndim == 2
        sides.append(side if is_shared else Transform(side.down[part], side.up[part]))
    digest = layer_maps.digest and f"{layer_maps.digest} {rank} of {size}"
    key = (digest, layer_maps.layer, layer_maps.kinds, layer_maps.folded)
    return _shared(key, lambda: LayerMaps(sides[0], sides[1], *key, key_mean=key_mean))


def reads_folded(digest: str, layer: str, folds: bool, kinds: Kinds) -> bool:
    """Return whether attached models read a saved cache with the value map folded.

    This is `folds`, as it was saved, unless all models attached with these maps read it the other way.
    """
    if (digest, layer, kinds, folds) in _at_hand:
        return folds
    return folds != ((digest, layer, kinds, not folds) in _at_hand)


def find(digest: str, layer: str, folds: bool = False, kinds: Kinds = ROTATED) -> LayerMaps:
    """Return the maps that a saved cache refers to. Raises UserError if they are not on this machine."""
    if (layer_maps := _at_hand.get((digest, layer, kinds, folds))) is not None:
        return layer_maps
    if (layer_maps := _at_hand.get((digest, layer, kinds, not folds))) is not None:
        return folded(layer_maps, folds)
    from mlxkv.formats.calibration import artifact

    calibration = artifact.with_digest(digest)
    if calibration is None or layer not in calibration.layers:
        raise UserError(
            f"[CompressedKVCache] this cache needs the calibration it was stored with; got none "
            f"with digest {digest}; load its model with that file (--calibration FILE) first"
        )
    return folded(of(calibration, kinds, [layer])[layer], folds)


@lru_cache(maxsize=8)
def sample(heads: int, dims: tuple[int, int], kinds: Kinds = ROTATED) -> LayerMaps:
    """Make random maps for heads of (key, value) dims, to test or time kernels."""
    from mlxkv.formats.calibration import layers

    keys, values = map(_random, kinds, (heads, heads), dims)
    mean = np.cos(np.arange(heads * dims[0])).reshape(heads, dims[0])
    key_mean = _key_mean(mean) if layers.is_centred(kinds[0]) else None
    return LayerMaps(keys, values, kinds=kinds, key_mean=key_mean)


def _key_mean(mean: np.ndarray) -> KeyMean:
    """mean: [G, D]."""
    return KeyMean(mx.array(mean.astype(np.float32)[:, None]))


def _random(kind: str, heads: int, dims: int) -> Transform:
    name, _, size = kind.partition(" ")
    kind = CENTRED.get(name, kind)
    transform = matrices.random_basis(heads, dims, dims)
    if kind.startswith(PCA):
        size = kind.split()[1]
        rank = int(size) if size.isdigit() else LowRank(float(size)).dims(dims)
        return _transform(transform[..., :rank])
    if CENTRED.get(name, name) == MIXED_BITS:
        if not size:
            raise UserError(
                "[--kv] random maps have no mixed bits; got fill-NUMBER; choose centred-int2 or another"
            )
        return _transform(transform[..., : DIMS * len(size.split(","))])
    if kind in (CALIBRATED, SHARED):
        return _transform(transform if kind == CALIBRATED else transform[:1])
    if kind == SCALED:
        return _scaled(2 ** np.cos(np.arange(dims)))
    # Scaled by 1/2 to 2 between two rotations, so that `up` is far from the transpose.
    stretch = 2 ** np.linspace(-1, 1, dims)
    back = matrices.random_basis(heads, dims, dims + 1)
    return _pair(
        transform * stretch @ back, back.swapaxes(-1, -2) / stretch @ transform.swapaxes(-1, -2)
    )


def _transform(down: np.ndarray) -> Transform:
    """Return the transform of orthonormal columns [G, D, D] (or [G, D, R]), or [1, D, D] shared by all heads."""
    return _pair(down, down.swapaxes(-1, -2))


def _scaled(scale: np.ndarray) -> Transform:
    """Return SRFT with a scale [D] per channel; quantizing may use its butterflies."""
    srft = transform.make(transform.SRFT, len(scale), 0)
    assert srft is not None
    return srft.scaled(mx.array(scale.astype(np.float32)))


def _pair(down: np.ndarray, up: np.ndarray) -> Transform:
    """Return the transform of a map and its inverse, shaped as for `_transform`."""
    both = (x[0] if len(x) == 1 else x for x in (down, up))
    down, up = (np.ascontiguousarray(x.astype(np.float32)) for x in both)
    return Transform(mx.array(down), mx.array(up))
