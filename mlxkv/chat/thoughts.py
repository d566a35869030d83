"""Show what a model thinks before it answers in dim letters, without the marks around it."""

from __future__ import annotations

import sys

from mlxkv.chat.wrap import Wrap
from mlxkv.models.replies.thinking import Thinking

DIM, PLAIN = "\x1b[2m", "\x1b[22m"


class Thoughts:
    """Writes pieces of a reply into `wrap`, to a terminal; text between the marks of thinking is dim.

    opened: whether the prompt ended with the first mark, as some chat templates write it.
    """

    def __init__(self, wrap: Wrap, thinking: Thinking, opened: bool = False):
        self._wrap, self._held, self._thinking = wrap, "", False
        self._start, self._end = thinking.start, thinking.end
        if opened:
            self._switch()

    def __call__(self, piece: str) -> None:
        """Write a piece. What may be the beginning of a mark waits for the next piece."""
        self._held += piece
        while (mark := self._end if self._thinking else self._start) and mark in self._held:
            text_before, _, self._held = self._held.partition(mark)
            self._wrap(text_before)
            self._switch()
        waits = next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
        ready = len(self._held) - waits
        self._wrap(self._held[:ready])
        self._held = self._held[ready:]

    def _switch(self) -> None:
        self._wrap.close()
        self._thinking = not self._thinking
        sys.stdout.write(DIM if self._thinking else PLAIN)

    def close(self) -> None:
        """Write what waits, and end dim letters."""
        self._wrap(self._held)
        self._wrap.close()
        if self._thinking:
            sys.stdout.write(PLAIN)
            sys.stdout.flush()
