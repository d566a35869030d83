"""Bases of low rank that follow the text, by Oja's rule. Spec: `spec.oja`.

U: [B, G, D, R] float32, orthonormal columns. A kernel factorises on a GPU; MLX does so only on the
CPU, where it takes tens of milliseconds a layer.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlxkv.cache.stores import Codes, Records, codes_of
from mlxkv.cache.view import CodePages, Parts, RecordPages
from mlxkv.codec.codec import Codec, Stored
from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import Transform
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.records import NAMES
from mlxkv.formats.rules.runs import Runs
from mlxkv.metal import launch
from mlxkv.metal.launch import Factory
from mlxkv.metal.whiten import RIDGE, TINY, orthonormal, whiten, why_not

BATCH = 32  # batches grow to a multiple of it for the kernel: there is one for every length
Pair = tuple[mx.array, mx.array]


def update(
    u: mx.array, x: mx.array, rate: float, raw: bool = False, make: Factory | None = None
) -> mx.array:
    """U after a batch x [B, G, N, D]. Where the batch holds NaN or infinity, U does not change. make:
    builds the kernel of `metal.whiten`, which must run for this size (`why_not`); None: plain ops."""
    if make is not None and not raw:
        return _updated(u, x.astype(mx.float32), rate, make)
    with mx.stream(mx.cpu):
        x = x.astype(mx.float32)
        y = x @ u
        step = (x - y @ u.swapaxes(-1, -2)).swapaxes(-1, -2) @ y
        if not raw:
            moment = y.swapaxes(-1, -2) @ y
            mean = mx.diagonal(moment, axis1=-2, axis2=-1).mean(-1)[..., None, None]
            moment = moment + (RIDGE * mean + TINY) * mx.eye(u.shape[-1])
            # LAPACK fails on NaN: unsound moments are replaced.
            sound = mx.isfinite(moment).all((-1, -2), keepdims=True)
            moment = mx.where(sound, moment, mx.eye(u.shape[-1]))
            step = mx.linalg.solve(moment, step.swapaxes(-1, -2)).swapaxes(-1, -2)
        made = u + rate * step
        sound = mx.isfinite(made).all((-1, -2), keepdims=True)
        return mx.where(sound, orthonormal(mx.where(sound, made, u)), u)


def _updated(u: mx.array, x: mx.array, rate: float, make: Factory) -> mx.array:
    """`update` by the kernel: y^T y + r I = L L^T, and y (y^T y + r I)^-1 = (y L^-T) L^-1."""
    x = mx.pad(x, [(0, 0), (0, 0), (0, -x.shape[-2] % BATCH), (0, 0)])  # zeros teach nothing
    y, count = x @ u, x.shape[-2]
    rest = x - y @ u.swapaxes(-1, -2)
    both = whiten(y, make, RIDGE)
    step = rest.swapaxes(-1, -2) @ (both[..., :count, :] @ both[..., count:, :].swapaxes(-1, -2))
    made = u + rate * step
    sound = mx.isfinite(made).all((-1, -2), keepdims=True)
    return mx.where(sound, whiten(mx.where(sound, made, u), make), u)


def taught(
    now: LayerMaps, config: CacheConfig, batch: Pair, prompt: bool, heads: tuple[int, int]
) -> LayerMaps:
    """`now` after a batch of keys and values [B, G, N, D], of a prompt or decoded. heads: (B, G)."""
    made, todo = {}, []
    for name, x in zip(("keys", "values"), batch, strict=True):
        side = getattr(config, name)
        if not side.follows:
            continue
        rate = side.low.prefill_rate if prompt else side.low.decode_rate
        if rate:
            todo.append((name, whole(getattr(now, name), heads), x, rate, side.low.raw))
    if len(todo) == 2 and _alike(*todo):  # both in one kernel take the time of one
        (keys, *first), (values, *second) = todo
        u, x = (mx.concatenate(pair) for pair in zip(first[:2], second[:2], strict=True))
        made[keys], made[values] = mx.split(_update(u, x, *first[2:]), 2)
    else:
        made |= {name: _update(*rest) for name, *rest in todo}
    return replace(now, **{n: transform_of(u) for n, u in made.items()}) if made else now


def _alike(one: tuple, other: tuple) -> bool:
    return (
        one[1].shape == other[1].shape and one[2].shape == other[2].shape and one[3:] == other[3:]
    )


def _update(u: mx.array, x: mx.array, rate: float, raw: bool) -> mx.array:
    """`update` by kernels where they run."""
    make = launch.factory()
    return update(u, x, rate, raw, None if why_not(*u.shape[-2:], make) else make)


def whole(transform: Transform, heads: tuple[int, int]) -> mx.array:
    """U of a transform for each of (B, G)."""
    down = transform.down
    return mx.broadcast_to(down, (*heads, *down.shape[-2:]))


def transform_of(u: mx.array) -> Transform:
    return Transform(u, u.swapaxes(-1, -2))


# -- `Segments`: sealed pages in runs of one basis each, for caches whose basis follows the text.
#
# Each run is a store with pages of its own, not a part of one array: kernels read the records of a
# second run from the start of its buffer, and MLX would copy a slice.


class Segments(Runs):
    def __deepcopy__(self, memo):
        other = copy(self)
        other.runs = deepcopy(self.runs, memo)
        other.bases = list(self.bases)
        return other

    @property
    def dims(self) -> tuple[int, int]:
        return self.runs[0].dims

    def encode_by(self, way: str) -> None:
        """Encode the next pages this way."""
        self.make = partial(self.make, way=way)
        for run in self.runs:
            run.encode_by(way)

    def whole(self) -> Parts | CodePages | RecordPages:
        """A snapshot of all pages."""
        parts = [run.whole() for run in self.runs if run.count]
        return parts[0] if len(parts) == 1 else Parts(tuple(parts))

    def _codes(self, run: Codes | Records) -> dict[str, Stored]:
        return codes_of(run)

    def _merged(self, run: Codes | Records, after: Codes | Records) -> dict:
        return _merged(run, after)

    def _parts(self, snapshots) -> Parts:
        return Parts(tuple(snapshots))

    def _taken(
        self, codes: dict[str, Stored], begin: int, chosen: mx.array, count: int
    ) -> tuple[dict[str, Stored], int]:
        first = mx.broadcast_to(mx.arange(begin), (*chosen.shape[:2], begin))
        at = mx.concatenate([first, begin + chosen], axis=2)
        made = {n: {k: _taken(x, at, count) for k, x in codes[n].items()} for n in NAMES}
        return made, at.shape[2]

    def _counts(self, counts: list[int]) -> mx.array:
        return mx.array(counts, mx.int32)

    def _saved(self, basis: LayerMaps | None) -> Stored:
        return {} if basis is None else saved(basis)

    def _loaded(self, arrays: Stored) -> LayerMaps | None:
        return loaded(self.start, arrays)


def saved(basis: LayerMaps) -> Stored:
    """U of the sides whose basis belongs to this cache alone."""
    sides = {name: getattr(basis, name).down for name in NAMES}
    return {name: u for name, u in sides.items() if u.ndim == 4}


def loaded(start: LayerMaps | None, arrays: Stored) -> LayerMaps | None:
    """Invert `saved`; start: basis of the calibration."""
    return replace(start, **{n: transform_of(u) for n, u in arrays.items()}) if arrays else start


def _merged(run: Codes | Records, after: Codes | Records) -> dict:
    """The state of a run, transported into the basis of the next one, and of the next one together."""
    if not run.count:
        return after.state
    if type(run) is Records and run.layout.sealed_by_kernel:
        moved = run.transported(after.codecs)
        return _joined(moved, after.state) if after.count else moved
    moved = transported(run, after.codecs)
    if not after.count:
        return moved
    rest = codes_of(after)
    return {name: _joined(moved[name], rest[name]) for name in NAMES}


def transported(run: Codes | Records, codecs: tuple[Codec, Codec]) -> dict[str, Stored]:
    """The codes of a run, encoded again in the bases of `codecs`. Spec: `spec.oja.transported`."""
    out = {}
    if not run.count:
        return out
    stored = codes_of(run)
    for name, old, new in zip(NAMES, run.codecs, codecs, strict=True):
        if old.transform is new.transform:
            out[name] = stored[name]
            continue
        values = old.decode_stored(stored[name], mx.float32)
        moved = values @ (old.transform.up @ new.transform.down)
        out[name] = new.method.encode(new.spec, moved, new.page)
    return out


def _joined(first: Stored, second: Stored) -> Stored:
    return {k: mx.concatenate([x, second[k]], axis=2) for k, x in first.items()}


def _taken(x: mx.array, at: mx.array, units: int) -> mx.array:
    """Rows of x [B, G, rows, W] that belong to the units `at` [B, G, N] of `units`."""
    batch, heads, rows, width = x.shape
    each = rows // units
    x = x.reshape(batch, heads, units, each * width)
    return mx.take_along_axis(x, at[..., None], axis=2).reshape(batch, heads, -1, width)
