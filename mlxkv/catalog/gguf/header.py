"""Read the header of a GGUF file: values by name, and the location of each tensor. No framework, no weights.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Every count and length is
checked against the file's size before use. The reader of the `gguf` package checks none, and makes arrays of each
text: 25 s and .5 GB for a vocabulary of 152,000 tokens, .7 s here.
"""

from __future__ import annotations

import os
import struct
from array import array
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mlxkv import untrusted
from mlxkv.untrusted import Tensor, TensorsHeader, Unsound

OTHER_FILE = "choose another file, or the model's folder in the hub's format"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST = 64 << 20  # bytes of a header; 262,144 tokens and their merges take 16 MiB
ENTRIES, STRINGS = 1 << 16, 1 << 21  # values, or tensors; texts of one header
DIMS = 4
ALIGNMENT = "general.alignment"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
NUMBERS |= {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class TensorKind(NamedTuple):
    """A type of numbers in tensors: `block` of them in `size` bytes."""

    name: str
    block: int
    size: int


# By ggml's type number: those that the `gguf` package decodes, except ternary ones.
KINDS = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    10: TensorKind("Q2_K", 256, 84),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    16: TensorKind("IQ2_XXS", 256, 66),
    17: TensorKind("IQ2_XS", 256, 74),
    18: TensorKind("IQ3_XXS", 256, 98),
    19: TensorKind("IQ1_S", 256, 50),
    20: TensorKind("IQ4_NL", 32, 18),
    21: TensorKind("IQ3_S", 256, 110),
    22: TensorKind("IQ2_S", 256, 82),
    23: TensorKind("IQ4_XS", 256, 136),
    29: TensorKind("IQ1_M", 256, 56),
    30: TensorKind("BF16", 1, 2),
    39: TensorKind("MXFP4", 32, 17),
}
BY_NAME = {kind.name: kind for kind in KINDS.values()}


def is_gguf(path: Path) -> bool:
    """Return whether a regular file begins as GGUF files do; ollama's have no suffix."""
    try:
        with untrusted.opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, Unsound):
        return False


class _Reader:
    """Reads a file of `size` bytes from the front, never past its end."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._size = file, size
        self.at, self._strings = 0, 0

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > self._size:
            raise Unsound("is not whole: it ends inside its header, or a length there is too large")
        if self.at > MOST:
            raise Unsound(f"has a header larger than {MOST} bytes")
        return self._file.read(count)

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        self._strings += 1
        if self._strings > STRINGS:
            raise Unsound(f"has more than {STRINGS} texts in its header")
        data = self.take(int.from_bytes(self.take(8), "little"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise Unsound("has a text that is not UTF-8") from None

    def value(self) -> Any:
        """Return a number, a text, or an array of either."""
        kind = self.number("I")
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise Unsound("has a value of an unknown type")
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            if count > STRINGS:
                raise Unsound(f"has more than {STRINGS} texts in its header")
            return [self.text() for _ in range(count)]
        if kind not in NUMBERS:
            raise Unsound("has an array of arrays, or of an unknown type")
        form = "B" if NUMBERS[kind] == "?" else NUMBERS[kind]
        return array(form, self.take(count * struct.calcsize(form)))

    def tensor(self) -> tuple[str, TensorKind, tuple[int, ...], int]:
        """Return (name, kind, shape with rows first, offset)."""
        name, dims = self.text(), self.number("I")
        if not 1 <= dims <= DIMS:
            raise Unsound(f"has a tensor of {dims} dimensions; they have 1 to {DIMS}")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))
        kind, offset = self.number("I"), self.number("Q")
        if kind not in KINDS:
            names = ", ".join(kind.name for kind in KINDS.values())
            raise Unsound(
                f"has a tensor of type {kind}, which is not read; those are {names}", OTHER_FILE
            )
        if shape[0] % KINDS[kind].block:
            raise Unsound("has a tensor whose rows are no whole number of blocks")
        return name, KINDS[kind], shape[::-1], offset


def read_header(path: Path) -> TensorsHeader:
    """Return the header of a GGUF file, checked against the file's size. metadata: numbers, texts, lists of texts, and
    arrays of numbers. tensors: types are ggml's names; shapes have rows first.

    Raises FileNotFoundError, and Unsound for any fault.
    """
    with untrusted.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        reader = _Reader(file, size)
        if reader.take(4) != MAGIC:
            raise Unsound("is no GGUF file")
        version = reader.number("I")
        if version not in VERSIONS:
            odd = "of the other byte order" if not version & 0xFFFF else f"of version {version}"
            raise Unsound(f"is a GGUF file {odd}; versions 2 and 3 are read", OTHER_FILE)
        tensors, values = reader.number("Q"), reader.number("Q")
        if max(tensors, values) > ENTRIES:
            raise Unsound(f"has more than {ENTRIES} values or tensors")
        metadata: dict[str, Any] = {}
        for _ in range(values):
            name = reader.text()
            if name in metadata:
                raise Unsound("has two values of one name")
            metadata[name] = reader.value()
        places = [reader.tensor() for _ in range(tensors)]
    alignment = metadata.get(ALIGNMENT, 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise Unsound("has an alignment that is no power of two")
    start = -(-reader.at // alignment) * alignment
    return TensorsHeader(metadata, _tensors(places, start, alignment, size), start, size)


def _tensors(
    places: list[tuple[str, TensorKind, tuple[int, ...], int]],
    start: int,
    alignment: int,
    size: int,
) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, kind, shape, offset in places:
        if name in out:
            raise Unsound("has two tensors of one name")
        if offset % alignment:
            raise Unsound("has a tensor that does not begin where its alignment says")
        first = start + offset
        last = first + prod(shape) // kind.block * kind.size
        out[name] = Tensor(kind.name, shape, (first, last))
    spans = sorted(tensor.span for tensor in out.values())
    if spans and (whole := max(last for _, last in spans)) > size:
        raise Unsound(f"is not whole: its header promises {whole} bytes, it has {size}")
    if any(span[1] > following[0] for span, following in zip(spans, spans[1:], strict=False)):
        raise Unsound("has tensors that overlap")
    return out
