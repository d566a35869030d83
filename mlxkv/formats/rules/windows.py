"""`Windows`: where the tokens of a cache are, when they are quantized, and how a cache takes them back. Counts alone,
for both tracks; no framework is imported here.

    tokens:  [ sink ][ page ] ... [ last page ][ recent ]

Any number of the last tokens can go, and what stays is read as before. Exact tokens stay exact where they exist: recent
ones, the sink, and the page that was quantized last, whose exact tokens are kept until the next one is quantized. A
cut into that page restores the last page and leaves what a cache that read only the other tokens would hold. A cut
into an older page decodes the tokens of it that stay into the recent window; they are encoded a second time when
that is quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig

Tensor = Any  # of the track
Pair = tuple[Tensor, Tensor]  # keys and values [B, G, T, D]
WINDOW = 32  # last queries of a prompt that choose tokens, where no basis follows


def between(pair: Pair, start: int | None, stop: int | None) -> Pair:
    """Return tokens start .. stop - 1 of keys and values."""
    keys, values = pair
    return keys[:, :, start:stop], values[:, :, start:stop]


class TrimSource(Enum):
    """The tokens whose first ones are the recent window after a trim."""

    RECENT = "the recent window"
    LAST = "the exact tokens of the last page, and the recent window behind them"
    PAGE = "a decoded page"
    SINK = "the sink"


@dataclass(frozen=True)
class TrimPlan:
    """Result of a trim. removed: tokens dropped. pages: quantized pages kept. recent: tokens of the recent window
    afterwards, the first ones of `source`; if that is a page, of the page after those kept."""

    removed: int
    source: TrimSource
    pages: int
    recent: int


@dataclass(frozen=True)
class FlushPlan:
    """Tokens that leave a full recent window. sink: tokens moved to the sink. pages: pages quantized after these. stop:
    first token that stays recent."""

    sink: int
    pages: int
    stop: int


@dataclass(frozen=True)
class Windows:
    """Location of the tokens of a sequence.

    sink: tokens of the sink that have left the recent window. pages: quantized ones. recent: tokens of the recent
        window.
    keeps_last: whether the exact tokens of the page quantized last are there. dropped: tokens that were read and are
        not stored.
    shortest: the shortest start that can be kept, beside an empty one; not 0 where tokens were chosen or moved.
    """

    config: CacheConfig
    sink: int
    pages: int
    recent: int
    keeps_last: bool
    dropped: int = 0
    shortest: int = 0

    @property
    def offset(self) -> int:
        """Tokens that were read."""
        return self.dropped + self.sink + self.pages * self.config.page + self.recent

    @property
    def trimmable(self) -> int:
        """Return how many of the last tokens can be trimmed; trimming all tokens is always possible."""
        return self.offset - self.shortest

    def can_keep(self, count: int) -> bool:
        """Return whether the first `count` tokens can be kept alone."""
        return not count or count >= self.shortest

    def trim(self, n: int) -> TrimPlan:
        """Plan to drop the last n tokens, at most all. Raises UserError if the others cannot be kept alone."""
        n = max(0, min(self.offset, n))
        count, page = self.offset - n, self.config.page
        if not self.can_keep(count):
            raise UserError(
                f"[cache] tokens before the last {self.trimmable} were dropped or moved, and only go together; "
                f"got {n} to take back; choose at most {self.trimmable}, or all {self.offset}"
            )
        recent = self.recent - n  # below 0: into pages
        if not n:
            return TrimPlan(0, TrimSource.RECENT, self.pages, recent)
        if not count or (count <= self.sink and not self.shortest):
            return TrimPlan(n, TrimSource.SINK, 0, count)
        if self.keeps_last and -page < recent <= self.config.recent:
            return TrimPlan(n, TrimSource.LAST, self.pages - 1, page + recent)
        if recent >= 0:
            return TrimPlan(n, TrimSource.RECENT, self.pages, recent)
        return TrimPlan(n, TrimSource.PAGE, self.pages + recent // page, recent % page)

    def flush(self, recent: int) -> FlushPlan:
        """Plan which of `recent` tokens leave the window, for more than `recent_capacity`."""
        sink = 0 if self.sink else self.config.sink
        pages = self.config.pages_over(recent - sink)
        return FlushPlan(sink, pages, sink + pages * self.config.page)
