"""Break a stream of text at the edge of a terminal between words, and show what a model thinks before it answers in
dim letters, without the marks around it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from rich.cells import cell_len

from mlxkv.generate.roles import Thinking

FENCE = "```"


class Wrap:
    """Writes pieces of text by `write`, in lines of at most `width` cells. Code, indented or between fences,
    and words that are longer than a line stay as they are."""

    def __init__(self, write: Callable[[str], None], width: int):
        self._write, self._width = write, width
        self._word, self._space = "", ""  # not written yet
        self._line = ""  # what is written of the line, as the text has it
        self._column, self._fenced = 0, False

    def __call__(self, piece: str) -> None:
        """Write a piece. Its last word waits for the next piece, as it may go on."""
        out = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", piece):
            if part == "\n":
                out.append(self._ended())
                if self._line.lstrip().startswith(FENCE):
                    self._fenced = not self._fenced
                out.append("\n")
                self._line, self._column = "", 0
            elif part.isspace():
                out.append(self._ended(spaces=False))
                self._space += part
            else:
                self._word += part
        self._write("".join(out))

    def close(self) -> None:
        """Write what waits."""
        self._write(self._ended())

    def _ended(self, spaces: bool = True) -> str:
        """Return the word that waits with the spaces before it, or a break in their place; without a word, spaces
        at the end of a line."""
        word, space = self._word, self._space
        if not word:
            self._space = "" if spaces else space
            return space if spaces else ""
        self._word = self._space = ""
        size = cell_len(space) + cell_len(word)
        code = self._fenced or (self._line + space).startswith(("    ", "\t"))
        if self._line.strip() and space and not code and self._column + size > self._width:
            self._line += space + word
            self._column = cell_len(word)
            return "\n" + word
        self._line += space + word
        self._column += size
        return space + word


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
