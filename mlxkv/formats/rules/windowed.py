"""`WindowedCache`: how a cache of either track holds its tokens. No framework is imported here.

    tokens:  [ sink: full precision ][ page ] ... [ page ][ recent: full precision ]

`recent` holds everything until it is full; then the sink moves out and the oldest pages are encoded and quantized. The
page that was quantized last keeps its exact tokens beside its codes, until the next one is quantized: so that a `trim`
into it can restore it (`formats.rules.windows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxkv.formats.config import CacheConfig
from mlxkv.formats.rules.windows import Pair, Tensor, TrimPlan, TrimSource, Windows, between
from mlxkv.formats.sizes import buffer_tokens


class WindowedCache:
    """Sink, quantized pages and recent window of sequences of one length, by `config`.

    offset: tokens read. sink: the first tokens, once they have left the recent window. last: the exact tokens of the
    page quantized last. store: quantized pages.
    """

    config: CacheConfig
    offset: int

    # -- what a track adds

    _zeros: Callable[[Tensor, int], Tensor]  # like x [B, G, T, D], for so many tokens
    _copied: Callable[[Tensor], Tensor]
    _joined: Callable[[Tensor, Tensor], Tensor]  # tokens of both, one behind the other
    _new_store: Callable[[Pair], Any]  # for pages of such keys and values
    _decoded: Callable[[int, int], Pair]  # of this page, the first so many tokens

    def _forget(self) -> None:
        self.offset = 0
        self._recent: Pair | None = None  # buffers; `_count` tokens are in use
        self._count = 0
        self.sink: Pair | None = None
        self.last: Pair | None = None
        self.store: Any = None

    @property
    def windows(self) -> Windows:
        """The location of its tokens."""
        return Windows(
            self.config, self._sunk, self._count_pages, self._count, self.last is not None
        )

    @property
    def _count_pages(self) -> int:
        return self.store.count if self.store else 0

    @property
    def _recent_capacity(self) -> int:
        return self.config.recent_capacity(self.sink is not None)

    @property
    def _sunk(self) -> int:
        """Tokens of the sink that have left the recent window."""
        return self.sink[0].shape[2] if self.sink else 0

    # -- writing

    def _read_recent(self) -> Pair:
        assert self._recent is not None
        keys, values = self._recent
        if (count := self._count) == keys.shape[2]:
            return keys, values
        return keys[:, :, :count], values[:, :, :count]

    def _join(self, first: Pair, second: Pair) -> Pair:
        return self._joined(first[0], second[0]), self._joined(first[1], second[1])

    def _with_recent(self, new: Pair) -> Pair:
        """Return the recent tokens and new ones."""
        return self._join(self._read_recent(), new) if self._count else new

    def _append(self, keys: Tensor, values: Tensor, capacity: int = 0) -> None:
        """Append recent tokens. capacity: of a buffer that is made for them, by default what growing reserves."""
        end = self._count + keys.shape[2]
        if self._recent is None or end > self._recent[0].shape[2]:
            growing = min(self._recent_capacity, buffer_tokens(self._count, end))
            capacity = capacity or max(growing, end)
            buffers = self._zeros(keys, capacity), self._zeros(values, capacity)
            if self._count:
                for buffer, old in zip(buffers, self._read_recent(), strict=True):
                    buffer[:, :, : self._count] = old
            self._recent = buffers
        own_keys, own_values = self._recent
        own_keys[:, :, self._count : end] = keys
        own_values[:, :, self._count : end] = values
        self._count = end

    def _quantize_pages(self, recent: Pair) -> None:
        """Encode the oldest pages of `recent`, which no longer fits, and keep the rest."""
        due = self.windows.flush(recent[0].shape[2])
        if due.sink:
            self.sink = self._copy(between(recent, None, due.sink))
        if self.store is None:
            self.store = self._new_store(recent)
        self.store.append(recent, due.pages, due.sink)  # whole: kernels would copy slices
        self._recent, self._count = None, 0
        self.last = self._copy(between(recent, due.stop - self.config.page, due.stop))
        self._append(*between(recent, due.stop, None))

    def _copy(self, pair: Pair) -> Pair:
        return self._copied(pair[0]), self._copied(pair[1])

    # -- trimming

    def trim(self, n: int) -> int:
        """Drop the last n tokens and return how many were dropped.

        Raises UserError, without changes, if the remaining tokens cannot be kept alone.
        """
        plan = self.windows.trim(n)
        self._trim(plan)
        return plan.removed

    def trim_to(self, count: int) -> None:
        """Keep the first `count` tokens. Raises as `trim`."""
        self.trim(self.offset - count)

    def _trim(self, plan: TrimPlan) -> None:
        pair, offset = None, self.offset - plan.removed
        if plan.source is TrimSource.SINK:
            if plan.recent and self.sink is not None:
                pair = between(self.sink, None, plan.recent)
            self._forget()
        elif plan.source is not TrimSource.RECENT:
            if plan.source is TrimSource.LAST:
                assert self.last is not None
                pair = between(self._join(self.last, self._read_recent()), None, plan.recent)
            elif plan.recent:
                pair = self._decoded(plan.pages, plan.recent)
            self.store.truncate(plan.pages)
            self.last = None
        if pair is not None:
            self._recent, self._count = None, 0
            self._append(*pair)
        self._count, self.offset = plan.recent, offset

    # -- what a subclass saves

    def _extra(self) -> tuple[dict, dict]:
        """Return additional header entries and tensors."""
        return {}, {}

    def _restore_extra(self, header: dict, tree: dict) -> None:
        """Invert `_extra`, before pages are restored."""
