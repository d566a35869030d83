"""`TrimRules`: how a cache takes tokens back, for both tracks. No framework is imported here.

    tokens:  [ sink ][ page ] ... [ last page ][ recent ]

Any number of the last tokens can go, and what stays is read as before. Exact tokens stay exact where they exist: recent
ones, the sink, and the page that was quantized last, whose exact tokens are kept until the next one is quantized. A
cut into that page restores the last page and leaves what a cache that read only the other tokens would hold. A cut
into an older page decodes the tokens of it that stay into the recent window; they are encoded a second time when
that is quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig

Tensor = Any  # of the track
Pair = tuple[Tensor, Tensor]  # keys and values [B, G, T, D]


class Store(Protocol):
    """Quantized pages of either track."""

    @property
    def count(self) -> int: ...

    def truncate(self, count: int) -> None: ...


def between(pair: Pair, start: int | None, stop: int | None) -> Pair:
    """Return tokens start .. stop - 1 of keys and values."""
    keys, values = pair
    return keys[:, :, start:stop], values[:, :, start:stop]


class TrimRules:
    """A mixin over a compressed cache.

    dropped: tokens that were read and are not stored. pinned: length of the prompt whose last tokens stand
        behind the sink, out of order: nothing ends inside it.
    """

    dropped = pinned = 0

    # -- what a track adds

    config: CacheConfig
    offset: int
    _recent: Pair | None  # of `_count` tokens
    _count: int
    _sink: Pair | None
    _last: Pair | None
    _store: Store | None
    _forget: Callable[[], None]  # hold nothing
    _put_recent: Callable[[Pair], None]  # append recent tokens, where there are none
    # exact tokens of the page quantized last, and recent ones behind
    _last_and_recent: Callable[[], Pair]
    # The first tokens, so many, of a quantized page as attention reads them, in the type of the recent ones.
    _decoded: Callable[[int, int], Pair]

    @property
    def _count_pages(self) -> int:
        return self._store.count if self._store else 0

    @property
    def _held_store(self) -> Store:
        """The store, where pages have been quantized."""
        assert self._store is not None
        return self._store

    @property
    def _recent_capacity(self) -> int:
        """Tokens that `recent_count` may hold before pages have to be quantized."""
        return self.config.recent_capacity(self._sink is not None)

    # -- how far

    @property
    def trimmable(self) -> int:
        """Return how many of the last tokens `trim` takes back, though it may take all, too."""
        return self.offset - self._shortest

    @property
    def _shortest(self) -> int:
        """The shortest start that can be kept, beside an empty one: nothing ends among tokens that were chosen
        for a prompt, or moved."""
        if not self.dropped:
            return self.pinned
        fixed = self.dropped + self._sunk + self._fixed_pages * self.config.page
        return max(fixed, self.pinned)

    @property
    def _sunk(self) -> int:
        """Tokens of the sink that have left the recent window."""
        return self._sink[0].shape[2] if self._sink else 0

    @property
    def _fixed_pages(self) -> int:
        """Pages that only go with the whole cache."""
        return 0

    def can_keep(self, count: int) -> bool:
        """Return whether the first `left` tokens can be kept alone."""
        return not count or count >= self._shortest

    # -- going

    def trim(self, n: int) -> int:
        """Drop the last n tokens, return how many were dropped. Raises UserError, and changes nothing, where what
        is left cannot be kept alone (`can_keep`)."""
        n = max(0, min(self.offset, n))
        self.check_trim(n)
        self.trim_to(self.offset - n)
        return n

    def check_trim(self, n: int) -> None:
        """Raise UserError where the last n tokens cannot be taken back."""
        if not self.can_keep(self.offset - min(self.offset, n)):
            raise UserError(
                f"[cache] tokens before the last {self.trimmable} were dropped or moved, and only go together; "
                f"got {n} to take back; choose at most {self.trimmable}, or all {self.offset}"
            )

    def trim_to(self, count: int) -> None:
        """Keep the first `left` tokens, a length of `can_keep`."""
        if count == self.offset:
            return
        page = self.config.page
        recent_count = count - self.dropped - self._sunk - self._count_pages * page
        out_of_order = self.dropped or self.pinned
        if not count or (count <= self._sunk and not out_of_order):  # of the sink: recent again
            sink = between(self._sink, None, count) if count and self._sink else None
            self._forget()
            if sink is not None:
                self._put_recent(sink)
        elif self._last is not None and -page < recent_count <= self.config.recent:
            self._dequantize(recent_count)
        elif recent_count >= 0:
            self._count = recent_count
        else:
            self._decode_end(self._count_pages + recent_count // page, recent_count % page)
        self.offset = count

    def _dequantize(self, recent_count: int) -> None:
        """Restore the exact tokens of the last page; `recent_count` tokens stay behind its page (negative: fewer than
        the page)."""
        pair = between(self._last_and_recent(), None, self.config.page + recent_count)
        self._held_store.truncate(self._count_pages - 1)
        self._recent, self._count, self._last = None, 0, None
        self._put_recent(pair)

    def _decode_end(self, pages: int, count: int) -> None:
        """Keep so many pages, and `count` tokens of the next one as recent tokens."""
        pair = self._decoded(pages, count) if count else None
        self._held_store.truncate(pages)
        self._count, self._last = 0, None
        if pair is not None:
            self._recent = None
            self._put_recent(pair)
