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
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import mlx.core as mx

from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.batch_buffers import BatchBuffers
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import Records
from mlxkv.cache.view import View
from mlxkv.codec.transform import subtract_mean
from mlxkv.formats.layout import TOKENS
from mlxkv.metal.lengths import Division, Lengths, shared

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


class SingleStaticCache(StaticCache):
    """A `CompressedKVCache`: its pages as they are, its recent window in buffers of fixed capacity.

    Indices: offset, recent tokens before, then, of each sequence, records, sink tokens, recent tokens
    after, first record; in place of the records of plain ops, their tokens.

    writes: how many of its arrays, from the first on, a step writes.
    """

    writes = 2
    state: tuple[int, int, int]

    def __init__(self, cache: CompressedKVCache, new: int):
        if (recent := cache.recent_buffers) is None or (store := cache.store) is None:
            raise NotYet("nothing is quantized yet")
        self.cache, self.new, self.store = cache, new, store
        sink, config, pages = cache.sink, cache.config, store.pages
        self.n_sink = config.sink if sink else 0
        self.quantizes = cache.count + new > config.recent_capacity(sink is not None)
        self.key_mean = cache.key_mean
        self.key = self.store.form, self.n_sink, self.key_mean
        shape = recent[0].shape[:2]
        self.batch = shape[0]
        self.lockstep = type(self.store), shape, config.page, config.recent, self.n_sink
        self.state = cache.offset, cache.count, pages.counts[0]
        self.arrays = [*recent, *(sink or ()), *pages.arrays.values()]
        self.emulated = self.store.backend.emulated

    @property
    def indices(self) -> tuple[int, ...]:
        (offset, count, pages), batch = self.state, 1
        stored, step = pages * self.cache.config.page, 0
        if isinstance(self.store, Records):
            batch, heads, capacity, _ = self.store.pages.arrays["records"].shape
            stored, step = stored // TOKENS, heads * capacity
        rows = ((stored, self.n_sink, count + self.new, i * step) for i in range(batch))
        return offset, count, *(n for row in rows for n in row)

    @property
    def advance(self) -> tuple[int, ...]:
        new, rows = self.new, self.batch if isinstance(self.store, Records) else 1
        return new, new, *(0, 0, new, 0) * rows

    def append(
        self, arrays: Arrays, indices: StepIndices, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        recent = put(arrays[:2], (subtract_mean(self.key_mean, keys), values), indices, 1)
        sink, pages = _sink_and_pages(arrays, bool(self.n_sink), self.store.whole_buffers)
        division = Division(pages.tokens // TOKENS)
        lengths = indices.once(("lengths", division), lambda: Lengths(indices.array[2:], division))
        columns = partial(_columns, indices, self.n_sink, pages.tokens, recent[0].shape[2])
        view = View(recent, sink, pages, lengths=lengths, seen=columns)
        return recent, (view, view)

    def commit(self, arrays: Arrays) -> None:
        self.cache.commit(arrays, self.new)


def _sink_and_pages(arrays: Arrays, has_sink: bool, pages: Callable[[Arrays], object]) -> tuple:
    """Return the sink and the snapshot of the pages of arrays that begin with the recent window."""
    stop = 4 if has_sink else 2
    return tuple(arrays[2:stop]) or None, pages(arrays[stop:])


def _columns(indices: StepIndices, sink: int, pages: int, recent: int, new: int) -> mx.array:
    """Return the columns that each new token sees, bool [1, 1, L, sink + pages + recent] (capacities in tokens)."""

    def make() -> mx.array:
        in_pages = mx.arange(pages) < indices.array[2]
        in_recent = mx.arange(recent)[None] <= indices.array[1] + mx.arange(new)[:, None]
        earlier = mx.concatenate([mx.ones((sink,), mx.bool_), in_pages])
        earlier = mx.broadcast_to(earlier[None], (new, sink + pages))
        return mx.concatenate([earlier, in_recent], axis=1)[None, None]

    return indices.once(("seen", sink, pages, recent, new), make)


# -- The static caches of `BatchedKVCache`: sequences in shared arrays, for kernels, or one after the other.


def of_batch(
    cache: BatchedKVCache,
    new: int,
    row_class: type[CompressedKVCache] = CompressedKVCache,
    list_class: type[ListStaticCache] | None = None,
) -> StaticCache:
    """Return the static cache of a batch. row_class, list_class: of sequences that are read one after the other, and
    their static cache. Raises NotYet while prompts are read, and where the next step joins sequences."""
    if cache.is_padded:
        raise NotYet("prompts of unequal lengths are read")
    if (buffers := cache.buffers) is not None:
        return BatchStaticCache(cache, buffers, new)
    rows = cache.rows
    _check_rows(rows, row_class)
    if len(rows) > 1 and all(row.supports_batching for row in rows):
        raise NotYet("the sequences are about to join")
    return (list_class or ListStaticCache)(cache, new)


def _check_rows(rows: Sequence[CompressedKVCache], kind: type[CompressedKVCache]) -> None:
    """Raise Untraceable for sequences in caches of another class, NotYet where one has no pages."""
    if any(type(row) is not kind for row in rows):
        raise Untraceable(f"no static form of {type(rows[0]).__name__} in a batch")
    if not all(row.store is not None and row.store.count for row in rows):
        raise NotYet("nothing is quantized yet")


class BatchStaticCache(StaticCache):
    """Sequences in shared arrays. Indices, with one of each for every sequence: offsets, recent tokens
    before, then records, sink tokens, recent tokens after, and first record of one sequence after the other."""

    def __init__(self, cache: BatchedKVCache, buffers: BatchBuffers, new: int):
        self.cache, self.new, self.buffers = cache, new, buffers
        buffers.flush()
        store, config = buffers.store, buffers.config
        self.batch, pages = len(buffers.counts), buffers.pages
        self.division = shared(tuple(n * buffers.page_records for n in pages.counts))
        self.has_sink = buffers.sink is not None
        self.quantizes = buffers.quantizes_after(new)
        self.emulated = store.backend.emulated
        self.key = BatchStaticCache, store.form, self.division, self.has_sink, buffers.key_mean
        self.lockstep = BatchStaticCache, config.page, config.recent, config.sink
        state = buffers.offsets, buffers.counts, buffers.sink_full, pages.counts, pages.starts
        self.state = tuple(map(tuple, state))
        self.arrays = [*buffers.recent, *(buffers.sink or ()), *pages.arrays.values()]
        self.advance = (new,) * (2 * self.batch) + (0, 0, new, 0) * self.batch

    @property
    def indices(self) -> tuple[int, ...]:
        rows = [*self.buffers.offsets, *self.buffers.counts]
        for at, (records, sink, recent) in zip(*self.buffers.lengths, strict=True):
            rows += records, sink, recent + self.new, at
        return tuple(rows)

    def offset(self, indices: StepIndices) -> mx.array:
        return indices.once("offset", lambda: indices.array[: self.batch])

    def append(
        self, arrays: Arrays, indices: StepIndices, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        pair = subtract_mean(self.buffers.key_mean, keys), values
        recent = put(arrays[:2], pair, indices, self.batch, by_row=True)
        sink, pages = _sink_and_pages(arrays, self.has_sink, self.buffers.whole_buffers)
        lengths = indices.once(
            "lengths", lambda: Lengths(indices.array[2 * self.batch :], self.division)
        )
        view = View(recent, sink, pages, lengths=lengths, seen=_not_by_kernels)
        return recent, (view, view)

    def commit(self, arrays: Arrays) -> None:
        self.buffers.commit(arrays, self.new)
        self.cache.finalize()


def _not_by_kernels(new: int) -> mx.array:
    raise Untraceable("sequences in shared arrays are read without kernels")


class ListStaticCache(StaticCache):
    """Separate caches, all with quantized pages: the arrays of `row_class` for each."""

    row_class: type[SingleStaticCache] = SingleStaticCache

    def __init__(self, cache: BatchedKVCache, new: int):
        self.cache, self.statics = cache, [self.row_class(row, new) for row in cache.rows]
        self.emulated = any(static.emulated for static in self.statics)
        self.quantizes = any(static.quantizes for static in self.statics)
        self.key = type(self), *(static.key for static in self.statics)
        self.lockstep = type(self), *(static.lockstep for static in self.statics)
        self.state = tuple(static.state for static in self.statics)
        self.arrays = [x for static in self.statics for x in static.arrays]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(n for static in self.statics for n in static.indices)

    @property
    def advance(self) -> tuple[int, ...]:
        return tuple(n for static in self.statics for n in static.advance)

    def _by_row(self, indices: StepIndices) -> list[StepIndices]:
        counts = [len(static.indices) for static in self.statics]
        return indices.once("rows", lambda: list(map(StepIndices, _cut(indices.array, counts))))

    def offset(self, indices: StepIndices) -> mx.array:
        def make() -> mx.array:
            rows = zip(self.statics, self._by_row(indices), strict=True)
            return mx.stack([static.offset(group) for static, group in rows])

        return indices.once("offset", make)

    def append(
        self, arrays: Arrays, indices: StepIndices, keys: mx.array, values: mx.array
    ) -> tuple[Arrays, tuple]:
        buffers, views = [], []
        parts = _cut(arrays, [len(static.arrays) for static in self.statics])
        rows = zip(self.statics, parts, self._by_row(indices), strict=True)
        for i, (static, part, group) in enumerate(rows):
            new, view = static.append(part, group, keys[i : i + 1], values[i : i + 1])
            buffers += new
            views.append(view)
        return buffers, self.joined(views)

    def joined(self, views: Sequence[tuple]) -> tuple:
        """Join what `update_and_fetch` returns for each sequence into what it returns for all."""
        view = View(views[0][0].recent, rows=tuple((row, None) for row, _ in views))
        return view, view

    def commit(self, arrays: Arrays) -> None:
        parts = _cut(arrays, [static.writes for static in self.statics])
        for static, part in zip(self.statics, parts, strict=True):
            static.commit(part)
        self.cache.finalize()


def _cut(items, counts: Sequence[int]) -> list:
    """Split items into consecutive slices of these lengths."""
    return [items[start:stop] for start, stop in pairwise(accumulate(counts, initial=0))]
