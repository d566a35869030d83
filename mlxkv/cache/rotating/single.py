"""`WindowedKVCache`: a compressed cache that drops pages as they leave the sliding window of its layer.

    tokens:  [ sink: exact ] ... dropped ... [ page ][ page ] ... [ page ][ live: exact ]
                                    |<------------- window: max_size ------------->|

It stands for mlx-lm's `RotatingKVCache(max_size, keep)`: attention sees the first `keep` tokens and the last
`max_size - keep`, the new one included. Pages are sealed as in the cache of the whole text, and one is dropped
once no later token sees any of it; of the oldest page a part may be out of sight, which attention masks.
Tokens stand in their order, at most a page more than a ring has, so that masks are those of a causal window.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxkv.cache.compressed import NEW, CompressedKVCache
from mlxkv.cache.view import Pair, Sliding, View


class WindowedKVCache(CompressedKVCache):
    """As CompressedKVCache, for a `config` with `sliding` tokens, of which `sink` are kept for good."""

    observes = (
        True  # so that sequences are read one after the other: a page leaves each at its own time
    )

    def _clear(self) -> None:
        super()._clear()
        self.dropped = 0

    @property
    def max_size(self) -> int:
        """Tokens that attention sees at most."""
        return self.config.sliding

    @property
    def keep(self) -> int:
        """First tokens that it sees for good."""
        return self.config.sink

    # -- reading and writing

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[View, View]:
        view = self._windowed(super().update_and_fetch(keys, values)[0])
        self._drop()
        return view, view

    def keys_and_values(self) -> tuple[View, View]:
        view = self._windowed(super().keys_and_values()[0])
        return view, view

    def _windowed(self, view: View) -> View:
        return replace(view, sliding=Sliding(self.max_size, self.keep))

    def _first(self, offset: int) -> int:
        """The first position behind the sink that a token at position `offset` sees."""
        return max(self.keep, offset - self.max_size + self.keep + 1)

    def _drop(self) -> None:
        """Drop the pages that no later token sees."""
        gone = self._first(self.offset) - self.dropped - self._sunk
        count = min(gone // self.config.page, self._count_pages - 1)
        if count > 0:
            self._store.drop(count)
            self._roomy = NEW if self._roomy else 0
            self.dropped += count * self.config.page

    def written(self, live: Pair, new: int) -> None:
        super().written(live, new)
        self._drop()

    # -- the rest of mlx-lm's contract

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """As of mlx-lm's RotatingKVCache: None, "causal" or a boolean [N, T], by the columns of the view."""
        before = min(self.max_size - 1, self.offset)
        if N == 1 and (window_size is None or min(self.offset + 1, self.max_size) <= window_size):
            return None  # attention knows the window
        if N > 1 and before + N <= (window_size or self.max_size) and not return_array:
            return "causal"
        return self.seen(N, window_size)

    def seen(self, N: int, window_size: int | None = None) -> mx.array:
        """Return which columns of the view behind the next update each of its N tokens sees: boolean [N, T]."""
        columns = mx.arange(self.offset - self.dropped + N)
        position = mx.where(columns < self._sunk, columns, columns + self.dropped)
        size = min(window_size or self.max_size, self.max_size)
        kept = position < self.keep
        if N == 1:  # the ring of a step: the sink never leaves it
            return (kept | (position > self.offset - size + self.keep))[None]
        # mlx-lm counts the window by the columns of its ring, which has `max_size - 1` tokens before the
        # new ones: the sink leaves sight as tokens of the same prompt come.
        behind = max(0, self.offset - (self.max_size - 1))
        place = mx.where(kept, position, position - behind)
        there = kept | (place >= self.keep)
        rows = mx.arange(self.offset - behind, self.offset - behind + N)[:, None]
        return there & (rows >= place) & (rows < place + size)

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def is_trimmable(self) -> bool:
        """As of mlx-lm's RotatingKVCache: as long as nothing has left the window."""
        return self.offset < self.max_size

    @property
    def _least(self) -> int:
        """The shortest start whose next token sees no page that has left."""
        return self.dropped + self.max_size - 1 if self.dropped else 0

    # -- what is saved

    def _extra(self) -> tuple[dict, dict]:
        return {"dropped": self.dropped}, {}

    def _restore_extra(self, header: dict, tree: dict) -> None:
        self.dropped = header.get("dropped", 0)
        if self.dropped and self.dropped > header["offset"] - self.max_size + 1:
            raise ValueError(f"{self.dropped} tokens out of a window of {self.max_size}")
