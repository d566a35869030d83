"""Break a stream of text at the edge of a terminal between words, not within them."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len

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
        """The word that waits with the spaces before it, or a break in their place; without a word, spaces
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
