"""Element types: NumPy's and the marker for bfloat16 that NumPy lacks, with their C++ names."""

from typing import Any

import numpy as np

NAMES = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t", "bool": "bool"}
NAMES |= {
    f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


class bfloat16(np.ndarray):
    """Bits of bfloat16 values, held as uint16. The class itself names the type in a call."""


def to_bfloat16(x: Any) -> bfloat16:
    """Round to the nearest even, as every machine does."""
    word = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
    bits[np.isnan(np.asarray(x, np.float32))] = 0x7FC0
    return bits.view(bfloat16)


def to_float32(x: np.ndarray) -> np.ndarray:
    """Values of an array of any type of this module, bfloat16 included."""
    if isinstance(x, bfloat16):
        return (np.asarray(x).view(np.ndarray).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(x, np.float32)


def type_name(dtype: Any) -> str:
    """`float16` for np.float16 and np.dtype("float16"); `bfloat16` for the marker."""
    return "bfloat16" if dtype is bfloat16 else np.dtype(dtype).name


def array_type(x: np.ndarray) -> str:
    return "bfloat16" if isinstance(x, bfloat16) else x.dtype.name


def storage(name: str) -> np.dtype:
    """The NumPy type that holds the bits."""
    return np.dtype("uint16" if name == "bfloat16" else name)
