"""`GoesBack`: how a cache takes tokens back, for both tracks. No framework is imported here.

    tokens:  [ sink ][ page ] ... [ last page ][ live ]

Behind pages nothing exact is left but the live tokens and the page that was sealed last, whose exact tokens
are kept until the next one is sealed. So a short way back takes that seal back and leaves what a cache that
read only the other tokens would hold; a longer one ends at a page, and what was lost is read again.
"""

from __future__ import annotations

from typing import Any

from mlxkv.errors import UserError

Pair = tuple[Any, Any]  # keys and values [B, G, T, D] of the track


class GoesBack:
    """A mixin over a compressed cache, which has `config`, `offset`, the windows `_live` (of `_count`
    tokens), `_sink` and `_last`, and `_store` of `_count_pages` pages.

    dropped: tokens that were read and are not stored. pinned: length of the prompt whose last tokens stand
        behind the sink, out of order: nothing ends inside it.
    """

    dropped = pinned = 0

    # -- what a track adds

    def _forget(self) -> None:
        """Hold nothing."""
        raise NotImplementedError

    def _put_live(self, pair: Pair) -> None:
        """Append live tokens, where there are none."""
        raise NotImplementedError

    def _last_and_live(self) -> Pair:
        """The exact tokens of the page sealed last, and the live ones behind them."""
        raise NotImplementedError

    # -- how far

    @property
    def trimmable(self) -> int:
        """How many of the last tokens `trim` takes back, though it may take all but the sink, too."""
        if not self._count_pages or (self._count_pages == 1 and self._last is not None):
            return self.offset
        exact = self._count + (self.config.page if self._last is not None else 0)
        return max(0, exact - self.config.recent - 1)

    @property
    def _sunk(self) -> int:
        """Tokens of the sink that have left the live window."""
        return self._sink[0].shape[2] if self._sink else 0

    @property
    def _chosen(self) -> int:
        """Pages that only go with the whole cache."""
        return 0

    def keeps(self, left: int) -> bool:
        """Whether the first `left` tokens can be kept as a cache that read only them holds them: with
        `recent` exact tokens, or all."""
        whole = 0 if self.pinned else self._sunk
        return self.offset - left <= self.trimmable or (left <= whole and not self.dropped)

    def restart(self, limit: int) -> int:
        """The longest start of the tokens, of at most `limit`, that `cut` can keep, where tokens will be
        read again behind it: it may end at a page."""
        if self.keeps(limit):
            return limit
        whole = (limit - self.dropped - self._sunk) // self.config.page
        whole = min(whole, self._count_pages)
        kept = self.dropped + self._sunk + whole * self.config.page
        return 0 if whole < self._chosen or kept < self.pinned else kept

    # -- going

    def trim(self, n: int) -> int:
        """Drop the last n tokens, return how many were dropped.

        Leaves what a cache that read only the other tokens would hold. Raises UserError, and changes
        nothing, where that would take tokens whose exact values are gone (`keeps`).
        """
        n = max(0, min(self.offset, n))
        self.check_trim(n)
        self.cut(self.offset - n)
        return n

    def check_trim(self, n: int) -> None:
        """Raises UserError where the last n tokens cannot be taken back without loss."""
        if not self.keeps(self.offset - min(self.offset, n)):
            raise UserError(
                f"[cache] at most {self.trimmable} tokens can be taken back without loss; got {n}; "
                "read the prompt again, or use cut_back"
            )

    def cut(self, left: int) -> None:
        """Keep the first `left` tokens, a length of `keeps` or `restart`."""
        if left == self.offset:
            return
        page = self.config.page
        live = left - self.dropped - self._sunk - self._count_pages * page
        out_of_order = self.dropped or self.pinned
        if not left or (left <= self._sunk and not out_of_order):  # of the sink: live again
            kept = tuple(x[:, :, :left] for x in self._sink) if left else None
            self._forget()
            if kept is not None:
                self._put_live(kept)
        elif self._last is not None and -page < live <= self.config.recent:
            self._unseal(live)
        elif live >= 0:
            self._count = live
        else:
            self._store.truncate(self._count_pages + live // page)
            self._count, self._last = 0, None
        self.offset = left

    def _unseal(self, live: int) -> None:
        """Take the last seal back; `live` tokens stay behind its page (negative: fewer than the page)."""
        kept = tuple(x[:, :, : self.config.page + live] for x in self._last_and_live())
        self._store.truncate(self._count_pages - 1)
        self._live, self._count, self._last = None, 0, None
        self._put_live(kept)
