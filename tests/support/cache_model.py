"""What `CompressedKVCache` has to hold, in NumPy: tokens as attention sees them, built on the
spec."""

from __future__ import annotations

import numpy as np
from stored_spec import stored

from mlxkv.formats.config import CacheConfig


class CacheModel:
    """seen: (keys, values) as stored, each [B, G, T, D] float64; raw: as they came.

    pages: sealed pages. parted: the sink is a window of its own. undoable: the page sealed last can
    be taken back. decoded: up to which token values have gone through codes, though some may be live.
    """

    def __init__(self, config: CacheConfig):
        self.config = config
        self._clear()

    def _clear(self) -> None:
        self.seen: tuple[np.ndarray, np.ndarray] | None = None
        self.raw: tuple[np.ndarray, np.ndarray] | None = None
        self.pages, self.parted, self.undoable, self.decoded = 0, False, False, 0

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

    def cut(self, left: int) -> None:
        """Keep the first `left` tokens: exact where they are live, of the sink, or of the page sealed last; else as
        they were seen."""
        if left == 0:
            return self._clear()
        if left == self.tokens:
            return None
        page, live = self.config.page, self.live - (self.tokens - left)
        if left <= self.sink:  # live again
            self.parted, self.pages, self.undoable, self.decoded = False, 0, False, 0
        elif self.undoable and -page < live <= self.config.recent:  # its seal is taken back
            self.pages, self.undoable = self.pages - 1, False
        elif live < 0:
            self.pages, self.undoable = self.pages + live // page, False
            self.raw, self.decoded = self.seen, left
        end = self.sink + self.pages * page
        self.raw = tuple(x[:, :, :left] for x in self.raw)
        self.seen = tuple(
            np.concatenate([x[:, :, :end], y[:, :, end:]], 2)[:, :, :left]
            for x, y in zip(self.seen, self.raw, strict=True)
        )
        return None
