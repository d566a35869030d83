"""Element types: NumPy, MLX and the marker for bfloat16 that NumPy lacks, with their C++ names."""

from typing import Any

import numpy as np

NAMES = {
    "float32": "float",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
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
    """`float16` for np.float16, np.dtype("float16"), mx.float16; `bfloat16` for the marker."""
    if dtype is bfloat16:
        return "bfloat16"
    if type(dtype).__module__.startswith("mlx"):
        name = str(dtype).removeprefix("mlx.core.").rstrip("_")
    else:
        name = np.dtype(dtype).name
    if name not in NAMES:
        raise TypeError(f"[emulator] no kernel takes {name}. Choose from: {', '.join(NAMES)}.")
    return name


def storage(name: str) -> np.dtype:
    """The NumPy type that holds the bits."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def as_array(x: Any) -> np.ndarray:
    """A row-contiguous array of NumPy; MLX arrays are taken too, without importing MLX here."""
    if type(x).__module__.startswith("mlx"):
        if type_name(x.dtype) == "bfloat16":
            bits = np.array(x.view(_mlx_uint16(x)))
            return bits.view(bfloat16)
        return np.array(x)
    return x if isinstance(x, bfloat16) else np.asarray(x)


def _mlx_uint16(x: Any) -> Any:
    import mlx.core as mx

    return mx.uint16


def array_type(x: np.ndarray) -> str:
    return "bfloat16" if isinstance(x, bfloat16) else type_name(x.dtype)
