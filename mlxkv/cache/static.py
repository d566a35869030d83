"""Caches in a step of fixed shapes, traced once and replayed: whole buffers, and arrays of the lengths in use.
`patching.steps` has the loop around it.

A `StaticCache` is a cache as the next step finds it. On the host it has arrays, indices (how much of the arrays is in
use), and what a trace takes for granted. In the trace, `CacheProxy` is what the model's code sees in place of the
cache, and `StaticCache.append` computes what it writes and reads. On the host again, `StaticCache.commit` hands the
arrays that were written back to the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.batch_buffers import BatchBuffers
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.view import TracedView
from mlxkv.codec.transform import subtract_mean
from mlxkv.metal.lengths import Lengths

Arrays = Sequence[mx.array]
T = TypeVar("T")


class Untraceable(Exception):
    """A step cannot be traced, for good: its text says why."""


class NotYet(Exception):
    """This step cannot be traced; a later one may be."""


class StepIndices:
    """The integers of a cache in a step: an array in the trace, shared by caches of equal lengths.

    array: int32. results: what layers have made of it, for others in the same step.
    """

    def __init__(self, array: mx.array):
        self.array = array
        self.results: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key in this step."""
        if key not in self.results:
            self.results[key] = make()
        return self.results[key]

    def places(self, first: int, shape: tuple[int, ...], by_row: bool = False) -> mx.array:
        """Return the positions of new keys or values of shape [B, G, L, D], starting at index `first`.

        by_row: B indices from `first` on, one per sequence.
        """

        def make() -> mx.array:
            at = self.array[first : first + (shape[0] if by_row else 1)]
            at = at[:, None] + mx.arange(shape[2], dtype=mx.int32)
            return mx.broadcast_to(at[:, None, :, None], shape)

        return self.once(("places", first, shape), make)


class StaticCache:
    """A cache, as the next step of `new` tokens finds it. A subclass sets what follows.

    key: what the trace takes for granted, beside the shapes of arrays. lockstep: caches with equal ones
    have equal indices, as a rule. state: what the indices follow from, for equal `lockstep` and shapes.
    arrays: which the step reads, and may write. indices: integers.
    advance: by how much each of them grows in the step, where nothing is quantized. emulated: whether its kernels
    are such that no trace can hold them. quantizes: whether the step quantizes a page.
    """

    emulated = quantizes = False

    key: Hashable
    lockstep: Hashable
    state: Hashable
    arrays: Arrays
    indices: tuple[int, ...]
    advance: tuple[int, ...]

    def proxy(self, arrays: Arrays, indices: StepIndices) -> CacheProxy:
        """Return what the model's code sees in the trace. arrays, indices: in the trace."""
        return CacheProxy(self, arrays, indices)

    def offset(self, indices: StepIndices) -> mx.array:
        """Return the position of the first new token, int32: a scalar, index 0 unless overridden; or [B]."""
        return indices.once("offset", lambda: indices.array[0])

    def append(
        self, arrays: Arrays, indices: StepIndices, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        """Return, in the trace, the arrays that the step writes and what `update_and_fetch` returns."""
        raise NotImplementedError

    def make_mask(self, N: int, return_array: bool, window_size: int | None):
        if return_array or window_size is not None:
            raise Untraceable("the model's code asks compressed layers for a mask as an array")
        return None if N == 1 else "causal"

    def commit(self, arrays: Arrays) -> None:
        """Store the arrays that the trace wrote in the cache."""
        raise NotImplementedError


class CacheProxy:
    """A cache in a trace. Any use that a replay could not repeat raises Untraceable.

    written: the static cache's arrays after the step. shared: whether other layers read it, too.
    """

    shared = False
    written: Arrays | None = None

    def __init__(self, static: StaticCache, arrays: Arrays, indices: StepIndices):
        self._static, self._arrays, self._indices = static, arrays, indices
        self._views: tuple | None = None

    @property
    def offset(self) -> mx.array:
        return self._static.offset(self._indices)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        if self.written is not None:
            raise Untraceable("a layer writes to its cache twice")
        self.written, views = self._static.append(self._arrays, self._indices, keys, values)
        self._views = views
        return views

    def keys_and_values(self) -> tuple | None:
        """Return what `update_and_fetch` returned, for layers that share a cache (mlx-lm 0.32)."""
        self.shared = True
        return self._views

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        return self._static.make_mask(N, return_array, window_size)

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "bits":  # mlx-lm looks for its own quantized caches
            raise AttributeError(name)
        raise Untraceable(f"the model's code uses .{name} of its cache")


class UnusedStaticCache(StaticCache):
    """A cache that is empty when others are not: the model never uses it."""

    def __init__(self):
        self.key = self.lockstep = UnusedStaticCache
        self.arrays, self.state, self.indices, self.advance = [], (), (), ()

    def proxy(self, arrays: Arrays, indices: StepIndices) -> CacheProxy:
        return _UnusedCacheProxy()

    def commit(self, arrays: Arrays) -> None:
        pass


class _UnusedCacheProxy(CacheProxy):
    written = ()

    def __init__(self):
        pass

    @property
    def offset(self) -> mx.array:
        raise NotYet("nothing is read yet")

    def _wait(self, *args, **kwargs):
        raise NotYet("nothing is read yet")

    update_and_fetch = keys_and_values = make_mask = _wait


def put(
    pair: Arrays, new: tuple, indices: StepIndices, first: int, by_row: bool = False
) -> tuple[mx.array, mx.array]:
    """Return the buffers [B, G, capacity, D] with new keys and values; first, by_row: as in `StepIndices.places`.

    By a scatter: a slice at a dynamic place takes MLX twice as many kernels. Raises Untraceable for
    another batch or other heads, which a scatter would broadcast.
    """
    pairs = list(zip(pair, new, strict=True))
    if any(x.shape[:2] + x.shape[3:] != old.shape[:2] + old.shape[3:] for old, x in pairs):
        raise Untraceable("keys of another batch, or of other heads, than the cache holds")
    keys, values = (
        mx.put_along_axis(old, indices.places(first, x.shape, by_row), x.astype(old.dtype), axis=2)
        for old, x in pairs
    )
    return keys, values


class CompressedStaticCache(StaticCache):
    """A `CompressedKVCache`, or the `BatchBuffers` of several sequences: pages as they are, recent windows in buffers
    of fixed capacity.

    Indices: offset of each sequence whose lengths are its own, recent tokens before of each, then, of every sequence,
    records, sink tokens, recent tokens after, first record; in place of the records of plain ops, their tokens.
    """

    def __init__(self, cache: CompressedKVCache | BatchBuffers, new: int):
        if (recent := cache.step_windows()) is None or (store := cache.store) is None:
            raise NotYet("nothing is quantized yet")
        self.cache, self.new, self.store, config = cache, new, store, cache.config
        self.by_row, self.has_sink = isinstance(cache, BatchBuffers), cache.sink is not None
        self.count, self.key_mean = len(cache.offsets), cache.key_mean
        self.quantizes = cache.quantizes_after(new)
        self.emulated = store.backend.emulated
        division = self.by_row and cache.division  # of one cache, it follows from shapes
        self.key = store.form, division, self.has_sink, self.key_mean
        kind = self.by_row, type(store), recent[0].shape[:2]
        self.lockstep = *kind, config.page, config.recent, config.sink, self.has_sink
        self.state = cache.counters
        self.arrays = [*recent, *(cache.sink or ()), *store.arrays()]

    @property
    def indices(self) -> tuple[int, ...]:
        starts, rows = self.cache.lengths
        out = [*self.cache.offsets, *(recent for _, _, recent in rows[: self.count])]
        for at, (records, sink, recent) in zip(starts, rows, strict=True):
            out += records, sink, recent + self.new, at
        return tuple(out)

    @property
    def advance(self) -> tuple[int, ...]:
        return (self.new,) * (2 * self.count) + (0, 0, self.new, 0) * len(self.cache.lengths[0])

    def offset(self, indices: StepIndices) -> mx.array:
        if not self.by_row:
            return super().offset(indices)
        return indices.once("offset", lambda: indices.array[: self.count])

    def append(
        self, arrays: Arrays, indices: StepIndices, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        pair = subtract_mean(self.key_mean, keys), values
        recent = put(arrays[:2], pair, indices, self.count, self.by_row)
        sink = (arrays[2], arrays[3]) if self.has_sink else None
        pages = self.store.whole_buffers(arrays[4 if sink else 2 :])

        division = self.cache.division

        def lengths() -> Lengths:
            return Lengths(indices.array[2 * self.count :], division)

        def seen(new: int) -> mx.array:
            if self.by_row:
                raise Untraceable("sequences in shared arrays are read without kernels")
            n_sink = sink[0].shape[2] if sink else 0
            return _columns(indices, n_sink, pages.tokens, recent[0].shape[2], new)

        numbers = indices.once(("lengths", division), lengths)
        view = TracedView(recent, sink, pages, lengths=numbers, seen=seen)
        return recent, (view, view)

    def commit(self, arrays: Arrays) -> None:
        self.cache.commit(arrays, self.new)


def _columns(indices: StepIndices, sink: int, pages: int, recent: int, new: int) -> mx.array:
    """Return the columns that each new token sees, bool [1, 1, L, sink + pages + recent] (capacities in tokens)."""

    def make() -> mx.array:
        in_pages = mx.arange(pages) < indices.array[2]
        in_recent = mx.arange(recent)[None] <= indices.array[1] + mx.arange(new)[:, None]
        earlier = mx.concatenate([mx.ones((sink,), mx.bool_), in_pages])
        earlier = mx.broadcast_to(earlier[None], (new, sink + pages))
        return mx.concatenate([earlier, in_recent], axis=1)[None, None]

    return indices.once(("seen", sink, pages, recent, new), make)


# -- `BatchedKVCache`: sequences in shared arrays, for kernels, or one after the other.


def of_batch(
    cache: BatchedKVCache,
    new: int,
    row_class: type[CompressedKVCache] = CompressedKVCache,
    form: type[CompressedStaticCache] = CompressedStaticCache,
) -> list[CompressedStaticCache]:
    """Return the static cache of a batch in shared arrays, or of each of its sequences. row_class, form: of sequences
    that are read one after the other, and their static caches. Raises NotYet while prompts are read, and where the next
    step joins sequences."""
    if cache.is_padded:
        raise NotYet("prompts of unequal lengths are read")
    cache.finalize()  # a replay does not tell it what is new
    if (buffers := cache.buffers) is not None:
        return [form(buffers, new)]
    rows = cache.rows
    if any(type(row) is not row_class for row in rows):
        raise Untraceable(f"no static form of {type(rows[0]).__name__} in a batch")
    if not all(row.store is not None and row.store.count for row in rows):
        raise NotYet("nothing is quantized yet")
    if len(rows) > 1 and all(row.supports_batching for row in rows):
        raise NotYet("the sequences are about to join")
    statics = [form(row, new) for row in rows]
    for i, static in enumerate(statics):  # each has its own indices, the same in all layers
        static.key, static.lockstep = (i, static.key), (i, static.lockstep)
    return statics


class RowsProxy(CacheProxy):
    """A batch in a trace whose sequences are read one after the other: the proxies of all."""

    def __init__(self, kind: type[BatchedKVCache], rows: Sequence[CacheProxy]):
        self._kind, self._rows = kind, rows

    @property
    def offset(self) -> mx.array:
        groups = [row._indices for row in self._rows]
        make = partial(_stacked, self._rows)
        return groups[0].once(("offsets", *map(id, groups)), make)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        rows = enumerate(self._rows)
        views = [row.update_and_fetch(keys[i : i + 1], values[i : i + 1]) for i, row in rows]
        self._views = self._kind.joined(views)
        return self._views

    def keys_and_values(self) -> tuple | None:
        for row in self._rows:
            row.shared = True
        return self._views

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        return self._rows[0].make_mask(N, return_array, window_size)


def _stacked(rows: Sequence[CacheProxy]) -> mx.array:
    return mx.stack([row.offset for row in rows])
