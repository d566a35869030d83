"""Read files from untrusted sources: regular files only, of bounded size, with bounded JSON.

A fault raises `Unsound`, whose text says what is wrong; the caller says in which file. Only a missing file raises
FileNotFoundError.

    config = untrusted.read_json(path, 16 << 20)        # an object, a list, ...: as `json.loads`
    head = untrusted.safetensors(path)                  # head.metadata, head.tensors, head.start
    count = untrusted.whole(config["layers"], "layers", 1, 1000)
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

DEPTH = 64  # nesting of lists and objects; the files of models need less than 10
HEADER = 16 << 20  # bytes of a safetensors header: room for 100,000 tensors in one file
DIMS = 16  # most dimensions of a tensor
# Bits of a number by safetensors' type names.
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "C128": 128, "BOOL": 8, "F4": 4}
BITS |= {f"{sign}{bits}": bits for sign in "IU" for bits in (8, 16, 32, 64)}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"F6_E2M3": 6, "F6_E3M2": 6}
KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISLNK: "a link",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


class Unsound(ValueError):
    """Says what is wrong with a file or a text, without quoting it. way: what to do about it."""

    def __init__(self, fault: str, way: str = "fetch the file again"):
        super().__init__(fault)
        self.way = way


class Tensor(NamedTuple):
    """A tensor in a safetensors file. span: its first byte in the file and the one after its last."""

    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int]


@dataclass(frozen=True)
class TensorsHeader:
    """The header of a safetensors file. start: offset of the data. size: bytes of the file."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]
    start: int
    size: int


@contextmanager
def opened(path: Path | str, follow: bool = True) -> Iterator[BinaryIO]:
    """Open a regular file, for `with`; anything else is not even opened, as a pipe would wait for a writer.

    follow: whether the path's last part may be a link. Raises FileNotFoundError, and Unsound for other faults, also
    inside the block.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    if "\0" in os.fspath(path):
        raise Unsound("has no name that a file can have")
    try:
        # Before it is opened: opening a device may have effects.
        _insist(os.stat(path, follow_symlinks=follow).st_mode)
        handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            _insist(os.fstat(handle).st_mode)  # it may have been replaced
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unsound(f"cannot be read ({error.strerror or type(error).__name__})") from None


def _insist(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in KINDS.items() if test(mode)), "something else")
        raise Unsound(f"is {kind}, not a file")


def read_tensors(path: Path | str, most: int, follow: bool = True) -> bytes:
    """Return the bytes of a regular file, at most `most` of them. Raises FileNotFoundError and Unsound."""
    with opened(path, follow) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unsound(f"is larger than {most} bytes")
    return data


def read_json(
    path: Path | str, most: int, follow: bool = True, depth: int = DEPTH, infinity: bool = False
) -> Any:
    """Return the JSON in a file. Raises what `read_tensors` and `parse` raise."""
    return parse(read_tensors(path, most, follow), depth, infinity)


def parse(data: bytes | str, depth: int = DEPTH, infinity: bool = False) -> Any:
    """Parse JSON text of finite numbers, nested at most `depth` deep. infinity: whether to accept Infinity and
    -Infinity, which some models' configurations contain. Raises Unsound."""

    def constant(word: str) -> float:
        if word == "NaN" or not infinity:
            raise Unsound(f"has {word} for a number")
        return float(word)

    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        out = json.loads(text, parse_float=_finite, parse_constant=constant)
    except RecursionError:
        raise Unsound(f"is nested deeper than {depth}") from None
    except Unsound:
        raise
    except UnicodeDecodeError:
        raise Unsound("is not valid JSON (not UTF-8)") from None
    except json.JSONDecodeError as error:
        raise Unsound(f"is not valid JSON ({error})") from None
    except ValueError:  # Python refuses integers of thousands of digits
        raise Unsound("has a number with too many digits") from None
    level = [out] if isinstance(out, (dict, list)) else []
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return out
    raise Unsound(f"is nested deeper than {depth}")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise Unsound("has a number beyond all bounds")
    return number


def whole(value: Any, what: str, low: int = 0, most: int = 1 << 40) -> int:
    """Return `value` if it is an integer from `low` to `most`. what: its name, for the error. Raises Unsound."""
    if type(value) is not int or not low <= value <= most:
        got = value if type(value) is int and abs(value) < 1 << 64 else f"a {type(value).__name__}"
        got = "a huge number" if got == "a int" else got
        raise Unsound(f"has no {what} from {low} to {most}; got {got}")
    return value


def safetensors(path: Path | str, follow: bool = True, most: int = HEADER) -> TensorsHeader:
    """Return the header of a safetensors file, of at most `most` bytes, checked for types, shapes and size: the tensors
    must fill the file without gaps. Only the header is allocated. Raises FileNotFoundError, and Unsound for any
    fault."""
    with opened(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise Unsound(f"is no safetensors file: no room for its header in {size} bytes")
        if length > most:
            raise Unsound(f"has a header larger than {most} bytes")
        text = file.read(length)
    try:
        head, start = parse(text), 8 + length
    except Unsound as error:
        raise Unsound(f"has a header that {error}") from None
    if not isinstance(head, dict):
        raise Unsound("has a header that is not valid")
    metadata = head.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise Unsound("has metadata that are no texts by name")
    tensors = {name: _tensor(entry, start) for name, entry in head.items()}
    at = start
    for first, last in sorted(one.span for one in tensors.values()):
        if first != at:
            raise Unsound("has tensors that overlap, or leave gaps")
        at = last
    if at != size:
        raise Unsound(f"is not whole: its header promises {at} bytes, it has {size}")
    return TensorsHeader(metadata, tensors, start, size)


def _tensor(entry: Any, start: int) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [first, last]}:
            numbers = [*shape, first, last]
            sound = all(type(x) is int and 0 <= x < 1 << 63 for x in numbers)
            sound = sound and dtype in BITS and len(shape) <= DIMS
            if sound and prod(shape) * BITS[dtype] == 8 * (last - first):
                return Tensor(dtype, tuple(shape), (start + first, start + last))
    raise Unsound("has a header with a tensor whose type, shape and place do not fit together")
