"""The two kinds of error that commands report in one line; and the text of errors of compilers, drivers and GPUs."""

from __future__ import annotations

import re
import unicodedata

LINES, WIDTH, LONGEST = 3, 160, 8000  # lines in a reason, characters in a line, in a whole message
# After these a process cannot use its NVIDIA GPU any more.
_LOST = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|unspecified launch failure|device-side assert",
    re.IGNORECASE,
)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# MLX's first line says only that a library was not built; the compiler's lines follow it.
_ERROR = re.compile(r"\berror:", re.IGNORECASE)
_NOT_BUILT = re.compile(
    r"unable to (build|load)|(failed to|cannot) (compile|load)|nvrtc|program_source:", re.IGNORECASE
)
_MEMORY = re.compile(
    r"insufficient memory|out ?of ?memory|malloc\b|(failed|unable) to allocate|maximum allowed buffer"
    r"|failed to map segment|can't start new thread",
    re.IGNORECASE,
)


class UserError(ValueError):
    """An error that the user can fix: `[where] what; got X; choose from ...`. Exit code 2."""


class MachineError(RuntimeError):
    """An error of the machine (disk full, NaN in the logits, ...). Exit code 1."""


def text(error: BaseException) -> str:
    """Return the whole message, without empty lines and control characters."""
    plain = _COLOURS.sub("", str(error)).replace("\t", " ")
    lines = ("".join(map(_printable, line)).rstrip() for line in plain.splitlines())
    return "\n".join(line for line in lines if line.strip())[:LONGEST] or type(error).__name__


def reason(error: BaseException) -> str:
    """Return the first lines of the message that contain an error, else its first line, as one line."""
    lines = [" ".join(line.split()) for line in text(error).splitlines()]
    found = [line for line in lines if _ERROR.search(line)][:LINES] or lines[:1]
    return "; ".join(map(cut, found))


def brief(error: BaseException) -> str:
    """Return the message, line breaks included, as one line of at most `WIDTH` characters."""
    return cut(" ".join(text(error).split()))


def cut(line: str) -> str:
    """Return a line shortened to `WIDTH` characters."""
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def is_of_build(error: BaseException) -> bool:
    """Return whether a kernel failed to build, rather than failed to run."""
    return bool(_NOT_BUILT.search(text(error)) or _ERROR.search(text(error)))


def is_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, where another kernel would fail too."""
    return isinstance(error, MemoryError) or bool(_MEMORY.search(text(error)))


def is_of_lost_gpu(error: BaseException) -> bool:
    """Return whether this process cannot use the GPU any more."""
    return bool(_LOST.search(text(error)))


def _printable(letter: str) -> str:
    return "" if unicodedata.category(letter) in ("Cc", "Cf") else letter
