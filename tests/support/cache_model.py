"""What `CompressedKVCache` has to hold, in NumPy: tokens as attention sees them, built on the
spec."""

from __future__ import annotations

import numpy as np
from stored_spec import stored

from mlxkv.formats.config import CacheConfig


class CacheModel:
    """seen: (keys, values) as stored, each [B, G, T, D] float64.

    pages: sealed pages. parted: the sink is a window of its own. touched: tokens at the start of
    the live window that have been in a page and came back by a trim.
    """

    def __init__(self, config: CacheConfig):
        self.config = config
        self._clear()

    def _clear(self) -> None:
        self.seen: tuple[np.ndarray, np.ndarray] | None = None
        self.pages, self.parted, self.touched = 0, False, 0

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
        self.touched = max(0, self.touched - count * c.page)
        return step

    def trim(self, count: int) -> None:
        """Drop the last tokens. A page that is cut becomes live, with the values it had."""
        left = max(0, self.tokens - count)
        if left == 0:
            return self._clear()
        self.seen = tuple(x[:, :, :left] for x in self.seen)
        if self.live >= 0:
            self.touched = min(self.touched, self.live)
            return None
        self.pages, cut = divmod(max(0, left - self.sink), self.config.page)
        self.touched = cut
        if left <= self.sink:  # what is left of the sink is live again
            self.parted = False
        return None
