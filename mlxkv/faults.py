"""What a compiler, a driver or a GPU says when it fails, as a reason: one line for reports, the text for issues."""

from __future__ import annotations

import re
import unicodedata

LINES, WIDTH, LONGEST = 3, 160, 8000  # of a compiler's lines, of one of them, of the whole text
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# MLX's first line says only that a library was not built; the compiler's own lines come behind it.
_SAID = re.compile(r"\berror:", re.IGNORECASE)
_NOT_BUILT = re.compile(
    r"unable to (build|load)|(failed to|cannot) (compile|load)|nvrtc|program_source:", re.IGNORECASE
)
_MEMORY = re.compile(
    r"insufficient memory|out ?of ?memory|malloc\b|(failed|unable) to allocate|maximum allowed buffer",
    re.IGNORECASE,
)


def text(error: BaseException) -> str:
    """All that was said, line by line, without empty lines and control characters."""
    plain = _COLOURS.sub("", str(error)).replace("\t", " ")
    lines = ("".join(map(_printable, line)).rstrip() for line in plain.splitlines())
    return "\n".join(line for line in lines if line.strip())[:LONGEST] or type(error).__name__


def reason(error: BaseException) -> str:
    """The compiler's first lines with an error, or else the first line, as one line."""
    lines = [" ".join(line.split()) for line in text(error).splitlines()]
    said = [line for line in lines if _SAID.search(line)][:LINES] or lines[:1]
    return "; ".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in said)


def is_of_build(error: BaseException) -> bool:
    """Whether a kernel was not built, rather than built and failed as it ran."""
    return bool(_NOT_BUILT.search(text(error)) or _SAID.search(text(error)))


def is_of_memory(error: BaseException) -> bool:
    """Whether there was no room: another kernel would not have found more."""
    return bool(_MEMORY.search(text(error)))


def _printable(letter: str) -> str:
    return "" if unicodedata.category(letter) in ("Cc", "Cf") else letter
