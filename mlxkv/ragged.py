"""`Ragged`: the caches of several sequences in arrays of all, for one dispatch of each kernel.

    pages of all: one pool      sinks [B, G, sink, D]      live windows [B, G, room, D]

What a new token costs does not depend on the number of sequences: one scatter for keys, one for
values, one attention. Only sealing is work for each, once in a page of tokens. Every sequence holds
what a `CompressedKVCache` of its own would; pages are sealed when the next token comes, not before,
so that this step's attention still finds them as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import mlx.core as mx

from mlxkv import calibrated, sealed
from mlxkv.attention import DECODE_TOKENS
from mlxkv.cache import CompressedKVCache, Pair, View
from mlxkv.config import CacheConfig
from mlxkv.pool import PagePool
from mlxkv.records import TOKENS
from mlxkv.sealed import RecordPages, Records


@dataclass(frozen=True)
class RaggedView:
    """What attention reads of all sequences at once.

    pages: of the whole pool. starts: the first record of each sequence. lengths: of each (records,
    sink tokens, live tokens). sink, live: (keys, values), [B, G, room, D].
    """

    pages: RecordPages
    starts: tuple[int, ...]
    lengths: tuple[tuple[int, int, int], ...]
    sink: Pair | None
    live: Pair

    @property
    def tokens(self) -> int:
        """Of the longest sequence."""
        return max(records * TOKENS + sink + live for records, sink, live in self.lengths)

    @property
    def dtype(self) -> mx.Dtype:
        """Of the keys, for models that read it."""
        return self.live[0].dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, G, T, D] of the keys, for models that read it."""
        batch, heads, _, dims = self.live[0].shape
        return batch, heads, self.tokens, dims

    @cached_property
    def rows(self) -> tuple[View, ...]:
        """The view of each sequence alone."""
        out = []
        for i, (at, (count, sink, live)) in enumerate(zip(self.starts, self.lengths, strict=True)):
            windows = tuple(x[i : i + 1, :, :live] for x in self.live)
            first = tuple(x[i : i + 1] for x in self.sink) if sink else None
            if not count:
                out.append(View(windows, first, plain=True))
                continue
            each = self.pages.codecs[0].page // TOKENS
            headers = self.pages.headers
            if headers is not None:
                headers = headers[:, :, at // each : (at + count) // each]
            buffer, tokens = self.pages.buffer[:, :, at : at + count], count * TOKENS
            pages = replace(self.pages, buffer=buffer, tokens=tokens, headers=headers)
            out.append(View(windows, first, pages))
        return tuple(out)

    def __getattr__(self, name):
        return View.__getattr__(self, name)  # the same words for the same misuse


class Ragged:
    """Sequences that are numbered from 0. store: an empty one, which seals for all."""

    def __init__(self, row: CompressedKVCache, store: Records, heads: int, dtype: mx.Dtype):
        self.config, self.rotations, self.followed = row.config, row.rotations, row._followed
        self.store, self.heads, self.dtype = store, heads, dtype
        self.pool = PagePool(store.layout, self.config.page, heads)
        self.offsets: list[int] = []
        self.counts: list[int] = []  # live tokens
        self.parted: list[bool] = []  # whether the sink has moved out of the live window
        self.live: Pair = self._windows([], 0)
        self.sink: Pair | None = self._windows([], self.config.sink) if self.config.sink else None

    def __deepcopy__(self, memo):
        other = copy(self)  # the rest is never written in place
        for name in ("offsets", "counts", "parted", "pool"):
            setattr(other, name, deepcopy(getattr(self, name), memo))
        return other

    @classmethod
    def of(cls, rows: Sequence[CompressedKVCache], keys: mx.array, values: mx.array):
        """The caches, which are used up, as a `Ragged`; None where they have no kernels, or not the
        same. keys, values: the next tokens, [B, G, L, D]."""
        for row in rows:
            row._follow_weights()
        store = next((row._store for row in rows if row._store is not None), None)
        store = store or rows[0]._new_store((keys.shape[3], values.shape[3]), keys.dtype)
        if type(store) is not Records:
            return None
        out = cls(rows[0], store.empty(), keys.shape[1], keys.dtype)
        return out if out.join(rows) else None

    def join(self, rows: Sequence[CompressedKVCache]) -> bool:
        """Add caches, which are used up; False, and nothing has changed, if they are of another kind."""
        if not all(map(self._takes, rows)):
            return False
        if not rows:
            return True
        self.settle()
        parted = [row._sink is not None or not self.config.sink for row in rows]
        room = max(self.live[0].shape[2], DECODE_TOKENS + max(map(self._limit, parted)))
        windows = [row._live and row._read_live() for row in rows]
        self.live = self._joined(self.live, self._windows(windows, room))
        if self.sink is not None:
            windows = self._windows([row._sink for row in rows], self.config.sink)
            self.sink = self._joined(self.sink, windows)
        self.offsets += [row.offset for row in rows]
        self.counts += [row._count for row in rows]
        self.parted += parted
        self.pool.join([(r._store.state, r._count_pages) if r._store else ({}, 0) for r in rows])
        return True

    def _takes(self, row) -> bool:
        if type(row) is not CompressedKVCache or row.config != self.config:
            return False  # those of another class hear the queries of their own sequence
        if row.rotations is not self.rotations:
            return False
        if row.rotations is not None and row._followed != self.followed:
            return False
        if row._store is not None and not self.store.is_like(row._store):
            return False
        if row._live is None:
            return True
        return row._live[0].dtype == self.dtype and row._live[0].shape[:2] == (1, self.heads)

    def _windows(self, pairs: Sequence[Pair | None], room: int) -> Pair:
        """[B, G, room, D] of windows [1, G, tokens, D], with zeros behind."""
        out = []
        for side, dims in enumerate(self.store.dims):
            parts = [mx.zeros((0, self.heads, room, dims), self.dtype)]
            for pair in pairs:
                x = mx.zeros((1, self.heads, 0, dims), self.dtype) if pair is None else pair[side]
                parts.append(_padded(x, room))
            out.append(parts[0] if len(parts) == 1 else mx.concatenate(parts))
        return out[0], out[1]

    def _joined(self, ours: Pair, more: Pair) -> Pair:
        pairs = zip(ours, more, strict=True)
        return tuple(mx.concatenate([_padded(x, y.shape[2]), y]) for x, y in pairs)

    def _limit(self, parted: bool) -> int:
        """Live tokens of a sequence before a page has to be sealed."""
        return self.config.recent + self.config.page + (0 if parted else self.config.sink)

    @property
    def stale(self) -> bool:
        """Whether the model's weights may leave values elsewhere by now."""
        return self.rotations is not None and self.followed != calibrated.changes()

    # -- reading and writing

    def append(self, keys: mx.array, values: mx.array) -> RaggedView:
        """Append keys, values: [B, G, L, D] with L up to DECODE_TOKENS."""
        self.settle()
        new = keys.shape[2]
        at = _positions(tuple(self.counts), new)
        self.live = tuple(
            mx.put_along_axis(old, mx.broadcast_to(at, x.shape), x.astype(old.dtype), axis=2)
            for old, x in zip(self.live, (keys, values), strict=True)
        )
        self.counts = [n + new for n in self.counts]
        self.offsets = [n + new for n in self.offsets]
        return self._view()

    def view(self) -> RaggedView:
        """What attention reads without new tokens."""
        self.settle()
        return self._view()

    def _view(self) -> RaggedView:
        pool, store, sink = self.pool, self.store, self.config.sink
        records = (n * pool.each for n in pool.counts)
        sinks = (sink if parted else 0 for parted in self.parted)
        pages = RecordPages(
            *(
                store.codecs,
                store.layout,
                pool.arrays["records"],
                sum(pool.counts) * self.config.page,
            ),
            *(store.make, store.tiled, pool.arrays.get("headers")),
        )
        return RaggedView(
            pages,
            tuple(n * pool.each for n in pool.starts),
            tuple(zip(records, sinks, self.counts, strict=True)),
            self.sink,
            self.live,
        )

    def settle(self) -> None:
        """Seal a page of each sequence whose live window is full."""
        full = [i for i, n in enumerate(self.counts) if n > self._limit(self.parted[i])]
        for parted in (True, False) if full else ():
            if some := [i for i in full if self.parted[i] is parted]:
                self._seal(some, 0 if parted else self.config.sink)

    def _seal(self, some: list[int], start: int) -> None:
        """One page of each of these sequences, from live token `start` on, with what comes before as
        their sink."""
        at, page = mx.array(some, mx.int32), self.config.page
        live = self.live if len(some) == len(self.counts) else tuple(x[at] for x in self.live)
        encoded = self.store.encode(live, page, start)
        for n, i in enumerate(some):
            self.pool.append(i, {name: x[n : n + 1] for name, x in encoded.items()})
            self.parted[i] = True
            self.counts[i] -= start + page
        if start:
            parts = zip(self.sink, live, strict=True)
            self.sink = tuple(_put(x, at, y[:, :, :start]) for x, y in parts)
        moved = (mx.roll(x, -(start + page), axis=2) for x in live)
        if len(some) < len(self.counts):
            moved = (_put(x, at, y) for x, y in zip(self.live, moved, strict=True))
        self.live = tuple(moved)

    # -- sequences come, go, and shrink

    def cache(self, i: int) -> CompressedKVCache:
        """A sequence as a cache of its own, independent of this."""
        self.settle()
        out = CompressedKVCache(self.config, self.rotations)
        out._followed, out.offset = self.followed, self.offsets[i]
        if not out.offset:
            return out
        if self.config.sink and self.parted[i]:
            out._sink = tuple(mx.contiguous(x[i : i + 1]) for x in self.sink)
        out._append(tuple(x[i : i + 1, :, : self.counts[i]] for x in self.live))
        if count := self.pool.counts[i]:
            out._store = self.store.empty()
            out._store.restore(self.pool.read(i), count)
        return out

    def keep(self, indices: Sequence[int]) -> None:
        """Only these sequences, in this order."""
        at = mx.array(indices, mx.int32)
        self.live = tuple(x[at] for x in self.live)
        self.sink = self.sink and tuple(x[at] for x in self.sink)
        self.offsets = [self.offsets[i] for i in indices]
        self.counts = [self.counts[i] for i in indices]
        self.parted = [self.parted[i] for i in indices]
        self.pool.keep(indices)

    def trim(self, n: int) -> bool:
        """Drop the last n tokens of every sequence; False, and nothing has changed, unless all have
        more live tokens."""
        self.settle()
        if n >= min(self.counts):
            return False
        self.counts = [count - n for count in self.counts]
        self.offsets = [offset - n for offset in self.offsets]
        return True

    def arrays(self) -> list[mx.array]:
        """What is allocated."""
        return [*self.live, *(self.sink or ()), *self.pool.arrays.values()]


def why_not(cache: CompressedKVCache) -> str | None:
    """Why caches like this one, which holds tokens, are not decoded together, or None."""
    if type(cache) is not CompressedKVCache:
        return "it hears the queries of its own sequence"
    keys, values = cache._live
    return sealed.why_not(cache._stored, (keys.shape[3], values.shape[3]), keys.dtype)


def window_tokens(config: CacheConfig) -> int:
    """Tokens in full precision that are allocated for each sequence, at most."""
    return 2 * config.sink + config.recent + config.page + DECODE_TOKENS


def _padded(x: mx.array, room: int) -> mx.array:
    """[B, G, room, D] of [B, G, T, D], with zeros behind."""
    more = room - x.shape[2]
    return mx.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else x


def _put(x: mx.array, at: mx.array, rows: mx.array) -> mx.array:
    """x [B, ...] with rows [n, ...] at the places `at` of its first axis."""
    places = mx.broadcast_to(at[:, None, None, None], rows.shape)
    return mx.put_along_axis(x, places, rows, axis=0)


@lru_cache(maxsize=64)
def _positions(counts: tuple[int, ...], new: int) -> mx.array:
    """[B, 1, L, 1] where each of the new tokens goes; all layers of a step ask for the same."""
    first = mx.array(counts, mx.int32)[:, None] + mx.arange(new, dtype=mx.int32)
    return first[:, None, :, None]
