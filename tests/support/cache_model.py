"""What `CompressedKVCache` has to hold, in NumPy: tokens as attention sees them, built on the
spec."""

from __future__ import annotations

import numpy as np
from stored_spec import stored

from mlxkv.formats.config import CacheConfig


class CacheModel:
    """seen: (keys, values) as stored, each [B, G, T, D] float64; raw: as they came.

    pages: sealed pages. parted: the sink is a window of its own. undoable: the page sealed last can
    be taken back.
    """

    def __init__(self, config: CacheConfig):
        self.config = config
        self._clear()

    def _clear(self) -> None:
        self.seen: tuple[np.ndarray, np.ndarray] | None = None
        self.raw: tuple[np.ndarray, np.ndarray] | None = None
        self.pages, self.parted, self.undoable = 0, False, False

    @property
    def tokens(self) -> int:
        return 0 if self.seen is None else self.seen[0].shape[2]

    @property
    def sink(self) -> int:
        """Tokens of the sink, once it has parted from the live window."""
        return self.config.sink if self.parted else 0

    @property
    def live(self) -> int:
        return self.tokens - self.sink - self.pages * self.config.page

    def append(self, *new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append (keys, values); returns what attention sees in this step: what was stored, and
        the new tokens as they came."""
        c, before = self.config, self.seen or tuple(x[:, :, :0] for x in new)
        self.seen = tuple(np.concatenate(pair, 2) for pair in zip(before, new, strict=True))
        raw = self.raw or before
        self.raw = tuple(np.concatenate(pair, 2) for pair in zip(raw, new, strict=True))
        step = self.seen
        room = c.recent + c.page
        if self.live <= room + (0 if self.parted else c.sink):
            return step
        self.parted = True
        start = self.sink + self.pages * c.page
        count = -(-(self.live - room) // c.page)
        self.seen = tuple(
            stored(x, side, start, count, c.page)
            for x, side in zip(self.seen, (c.keys, c.values), strict=True)
        )
        self.pages += count
        self.undoable = True
        return step

    def fresh(self, tokens: int) -> int:
        """Pages of a cache that has read so many tokens one by one."""
        c = self.config
        over = tokens - c.sink - c.recent - c.page
        return max(0, -(-over // c.page))

    def takes_back(self, count: int) -> bool:
        """Whether the last tokens can go so that a fresh cache's state is left."""
        left = max(0, self.tokens - count)
        if count == 0 or left <= self.sink:
            return True
        return self.pages - self.fresh(left) <= self.undoable

    def trim(self, count: int) -> None:
        """Drop the last tokens, where `takes_back`: what was sealed too early is exact again."""
        self.cut(left := max(0, self.tokens - count), min(self.pages, self.fresh(left)))

    def cut(self, left: int, pages: int) -> None:
        """Keep the first tokens, so many pages of them sealed."""
        if left == 0:
            return self._clear()
        if left == self.tokens:
            return None
        if left <= self.sink:  # what is left of the sink is live again
            self.parted, pages = False, 0
        self.undoable &= pages == self.pages
        self.pages = pages
        self.raw = tuple(x[:, :, :left] for x in self.raw)
        end = self.sink + pages * self.config.page
        self.seen = tuple(
            np.concatenate([x[:, :, :end], y[:, :, end:]], 2)[:, :, :left]
            for x, y in zip(self.seen, self.raw, strict=True)
        )
        return None
