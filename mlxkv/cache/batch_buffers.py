"""`BatchBuffers`: the caches of several sequences in shared arrays, for one dispatch of each kernel.

    pages: one holder    sinks [B, G, sink, D]    live [B, G, capacity, D]    last pages [B, G, page, D]

The number of dispatches per new token does not depend on the number of sequences: one scatter for keys, one for values,
one attention. Only quantizing runs per sequence, once per page of tokens. Every sequence contains what a separate cache
would. Pages are quantized when the next token arrives, so that this step's attention reads them unquantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxkv.cache import choose
from mlxkv.cache.attention import DECODE_TOKENS
from mlxkv.cache.choose import KernelPlan
from mlxkv.cache.pages import Pages, Part
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import Pair, View, both
from mlxkv.codec.transform import subtract_mean
from mlxkv.formats.layout import TOKENS
from mlxkv.formats.rules.windows import FlushPlan, TrimSource, Windows
from mlxkv.metal.launch import begin
from mlxkv.metal.lengths import Division, Rows, batch_lengths, shared

if TYPE_CHECKING:
    from mlxkv.cache.compressed import CompressedKVCache


class BatchBuffers:
    """B sequences in shared buffers. like: template of a cache. store: encoder shared by all."""

    def __init__(self, like: CompressedKVCache, store: Records, heads: int, dtype: mx.Dtype):
        self.like = like
        self.config, self.layer_maps = like.config, like.layer_maps
        self.key_mean = like.key_mean
        self.heads, self.dtype = heads, dtype
        self.store = store.of_many(heads)
        self.offsets: list[int] = []
        self.counts: list[int] = []  # recent tokens
        self.sink_full: list[bool] = []  # whether the sink has moved out of the recent window
        # whether the exact tokens of the page quantized last are kept
        self.has_last_page: list[bool] = []
        self.recent: Pair = self._windows([], 0)
        self.last: Pair = self._windows([], self.config.page)
        self.sink: Pair | None = self._windows([], self.config.sink) if self.config.sink else None

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchBuffers:
        buffers = copy(self)  # other members are never written in place
        for name in ("offsets", "counts", "sink_full", "has_last_page", "store"):
            setattr(buffers, name, deepcopy(getattr(self, name), memo))
        return buffers

    @classmethod
    def of(
        cls, rows: Sequence[CompressedKVCache], plan: KernelPlan, heads: int, dtype: mx.Dtype
    ) -> BatchBuffers | None:
        """Return buffers of these sequences, or None if they do not share the same kernels.

        The caches in `rows` must not be used again. plan, heads, dtype: for their next tokens.
        """
        store = next((row.store for row in rows if row.store is not None), None)
        if store is None:
            store = choose.store(plan, rows[0].layer_maps)
        if not isinstance(store, Records):
            return None
        out = cls(rows[0].like(), store.empty(), heads, dtype)
        return out if out.join(rows) else None

    def join(self, rows: Sequence[CompressedKVCache]) -> bool:
        """Add sequences, whose caches must not be used again.

        Returns False, without changes, if they are of another kind.
        """
        if not all(map(self._takes, rows)):
            return False
        if not rows:
            return True
        self.flush()
        sink_full = [row.sink is not None or not self.config.sink for row in rows]
        capacity = max(map(self.config.recent_capacity, sink_full)) + DECODE_TOKENS
        capacity = max(self.recent[0].shape[2], capacity)
        self.recent = self._joined(
            self.recent, self._windows([row.recent for row in rows], capacity)
        )
        if self.sink is not None:
            windows = self._windows([row.sink for row in rows], self.config.sink)
            self.sink = self._joined(self.sink, windows)
        windows = self._windows([row.last for row in rows], self.config.page)
        self.last = self._joined(self.last, windows)
        self.has_last_page += [row.last is not None for row in rows]
        self.offsets += [row.offset for row in rows]
        self.counts += [0 if row.recent is None else row.recent[0].shape[2] for row in rows]
        self.sink_full += sink_full
        self.pages.join([_part(row.store) for row in rows])
        return True

    def _takes(self, row: CompressedKVCache) -> bool:
        if row.config != self.config or row.layer_maps is not self.layer_maps:
            return False
        if row.store is not None and not self.store.is_like(row.store):
            return False
        if row.recent is None:
            return True
        return row.recent[0].dtype == self.dtype and row.recent[0].shape[:2] == (1, self.heads)

    def _windows(self, pairs: Sequence[Pair | None], capacity: int) -> Pair:
        """Stack windows [1, G, tokens, D], padded with zeros, into [B, G, capacity, D]."""
        out: list[mx.array] = []
        for side, dims in enumerate(self.store.dims):
            parts = [mx.zeros((0, self.heads, capacity, dims), self.dtype)]
            for pair in pairs:
                x = mx.zeros((1, self.heads, 0, dims), self.dtype) if pair is None else pair[side]
                parts.append(padded(x, capacity))
            out.append(parts[0] if len(parts) == 1 else mx.concatenate(parts))
        return out[0], out[1]

    def _joined(self, windows: Pair, added: Pair) -> Pair:
        return both(lambda x, y: mx.concatenate([padded(x, y.shape[2]), y]), windows, added)

    @property
    def pages(self) -> Pages[str]:
        """The quantized pages of all sequences."""
        return self.store.pages

    def windows(self, i: int) -> Windows:
        """Return the `Windows` of a sequence."""
        sink = self.config.sink if self.sink_full[i] else 0
        last = self.has_last_page[i]
        return Windows(self.config, sink, self.pages.counts[i], self.counts[i], last)

    # -- reading and writing

    def append(self, keys: mx.array, values: mx.array) -> View:
        """Append keys, values: [B, G, L, D] with L up to DECODE_TOKENS."""
        self.flush()
        keys, new = subtract_mean(self.key_mean, keys), keys.shape[2]
        at = _positions(tuple(self.counts), new)

        def put(old: mx.array, x: mx.array) -> mx.array:
            places = mx.broadcast_to(at, x.shape)
            return mx.put_along_axis(old, places, x.astype(old.dtype), axis=2)

        self.commit((put(self.recent[0], keys), put(self.recent[1], values)), new)
        return self._view()

    def commit(self, recent: Sequence[mx.array], new: int) -> None:
        """Replace the recent windows by buffers with `new` more tokens per sequence."""
        self.recent = recent[0], recent[1]
        self.counts = [n + new for n in self.counts]
        self.offsets = [n + new for n in self.offsets]

    def quantizes_after(self, new: int) -> bool:
        """Return whether a page must be quantized after `new` more tokens per sequence."""
        pairs = zip(self.counts, self.sink_full, strict=True)
        return any(n + new > self.config.recent_capacity(sink_full) for n, sink_full in pairs)

    def step_windows(self) -> Pair:
        """Return the recent windows for a step of fixed shapes (`cache.static`)."""
        self.flush()
        return self.recent

    @property
    def counters(self) -> tuple[tuple[int, ...], ...]:
        """What `offsets` and `lengths` follow from, for buffers of one shape."""
        pages = self.pages
        lists = self.offsets, self.counts, self.sink_full, pages.counts, pages.starts
        return tuple(map(tuple, lists))

    @property
    def division(self) -> Division:
        """How kernels share out their work."""
        records = self.config.page // TOKENS
        return shared(tuple(n * records for n in self.pages.counts))

    def view(self) -> View:
        """Return the view without new tokens."""
        self.flush()
        return self._view()

    def _view(self) -> View:
        pages, (starts, rows) = self.store.whole_buffers(self.store.arrays()), self.lengths
        return View(self.recent, self.sink, pages, lengths=batch_lengths(rows, starts))

    @property
    def lengths(self) -> tuple[tuple[int, ...], Rows]:
        """The first record, and (records, sink tokens, recent tokens), of each sequence."""
        pages, sink, page_records = self.pages, self.config.sink, self.config.page // TOKENS
        records = (n * page_records for n in pages.counts)
        sinks = (sink if sink_full else 0 for sink_full in self.sink_full)
        return tuple(n * page_records for n in pages.starts), tuple(
            zip(records, sinks, self.counts, strict=True)
        )

    def flush(self) -> None:
        """Quantize a page of each sequence whose recent window is full."""
        capacity = self.config.recent_capacity
        due: dict[FlushPlan, list[int]] = {}
        for i, (n, sink_full) in enumerate(zip(self.counts, self.sink_full, strict=True)):
            if n > capacity(sink_full):
                due.setdefault(self.windows(i).flush(n), []).append(i)
        for plan in sorted(due, key=attrgetter("sink")):
            self._quantize_pages(due[plan], plan)

    def _quantize_pages(self, rows: list[int], due: FlushPlan) -> None:
        """Quantize the due pages of these sequences."""
        at, page, start = mx.array(rows, mx.int32), self.config.page, due.sink
        recent = (
            self.recent if len(rows) == len(self.counts) else both(lambda x: x[at], self.recent)
        )
        encoded = self.store.encode(recent, due.stop - start, start)
        for n, i in enumerate(rows):
            self.pages.append({name: x[n : n + 1] for name, x in encoded.items()}, due.pages, i)
            self.sink_full[i] = self.has_last_page[i] = True
            self.counts[i] -= due.stop
        if self.sink is not None and start:
            self.sink = both(lambda x, y: _put(x, at, y[:, :, :start]), self.sink, recent)
        stop = due.stop
        self.last = both(lambda x, y: _put(x, at, y[:, :, stop - page : stop]), self.last, recent)
        # No attention reads it: unevaluated, it would keep the old windows alive.
        begin(self.last)
        moved = both(lambda x: mx.roll(x, -stop, 2), recent)
        if len(rows) < len(self.counts):
            moved = both(lambda x, y: _put(x, at, y), self.recent, moved)
        self.recent = moved

    # -- sequences come, go, and shrink

    def row(self, i: int) -> CompressedKVCache:
        """Return a sequence as a separate cache."""
        self.flush()
        cache, sink, last, store = self.like.like(), None, None, None
        if not self.offsets[i]:
            return cache
        if self.sink is not None and self.sink_full[i]:
            sink = both(lambda x: mx.contiguous(x[i : i + 1]), self.sink)
        if self.has_last_page[i]:
            last = both(lambda x: mx.contiguous(x[i : i + 1]), self.last)
        recent = both(lambda x: x[i : i + 1, :, : self.counts[i]], self.recent)
        if count := self.pages.counts[i]:
            store = self.store.empty()
            store.restore(self.pages.read(i=i), count)
        cache.take_over(self.offsets[i], recent, sink, last, store)
        return cache

    def select(self, indices: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        at = mx.array([*indices], mx.int32)
        self.recent = both(lambda x: x[at], self.recent)
        self.sink = self.sink and both(lambda x: x[at], self.sink)
        self.last = both(lambda x: x[at], self.last)
        self.offsets = [self.offsets[i] for i in indices]
        self.counts = [self.counts[i] for i in indices]
        self.sink_full = [self.sink_full[i] for i in indices]
        self.has_last_page = [self.has_last_page[i] for i in indices]
        self.pages.select(indices)

    def trim(self, n: int) -> bool:
        """Drop the last n tokens of every sequence; return False, without changes, unless all are recent tokens."""
        self.flush()
        plans = [self.windows(i).trim(n) for i in range(len(self.counts))]
        if any(plan.source is not TrimSource.RECENT for plan in plans):
            return False
        self.counts = [plan.recent for plan in plans]
        self.offsets = [offset - n for offset in self.offsets]
        return True

    def arrays(self) -> list[mx.array]:
        """Return all allocated arrays."""
        return [*self.recent, *(self.sink or ()), *self.last, *self.store.arrays()]


def _part(store: Codes | Records | None) -> Part[str]:
    """Return the page arrays and page count of a store; empty without one."""
    return (store.state, store.count) if isinstance(store, Records) else ({}, 0)


def padded(x: mx.array, capacity: int) -> mx.array:
    """Pad [B, G, T, D] with zeros to [B, G, capacity, D]."""
    spare = capacity - x.shape[2]
    return mx.pad(x, [(0, 0), (0, 0), (0, spare), (0, 0)]) if spare else x


def _put(x: mx.array, at: mx.array, rows: mx.array) -> mx.array:
    """Return x [B, ...] with rows [n, ...] at indices `at` of its first axis."""
    places = mx.broadcast_to(at[:, None, None, None], rows.shape)
    return mx.put_along_axis(x, places, rows, axis=0)


@lru_cache(maxsize=64)
def _positions(counts: tuple[int, ...], new: int) -> mx.array:
    """Return the index of each new token, [B, 1, L, 1], cached since every layer of a step needs the same."""
    first = mx.array(counts, mx.int32)[:, None] + mx.arange(new, dtype=mx.int32)
    return first[:, None, :, None]
