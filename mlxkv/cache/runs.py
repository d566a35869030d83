"""`Segments`: sealed pages in runs of one basis each, for caches whose basis follows the text.

Each run is a store with pages of its own, not a part of one array: kernels read the records of a
second run from the start of its buffer, and MLX would copy a slice.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlxkv.cache.following import following
from mlxkv.cache.stores import Codes, Records, codes_of
from mlxkv.cache.view import CodePages, Parts, RecordPages
from mlxkv.codec.codec import Codec, Stored
from mlxkv.codec.maps import LayerMaps
from mlxkv.formats.records import NAMES
from mlxkv.formats.rules.runs import Runs


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
    return replace(start, **{n: following(u) for n, u in arrays.items()}) if arrays else start


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
