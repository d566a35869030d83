"""Unquantised values: full precision (the keys of `fp16/int4`), and the float16 numbers of low rank."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.codec.affine import HALF_MAX
from mlxkv.formats.quantizers import Full, Half

Raw = Full | Half


def encode(quantizer: Raw, x: mx.array, page: int) -> dict[str, mx.array]:
    """Store x [B, G, T, R] in its own dtype, or as float16 for `Half`."""
    if not quantizer.exact:
        x = mx.clip(x, -HALF_MAX, HALF_MAX).astype(mx.float16)
    return {"values": x}


def decode(
    quantizer: Raw, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """Return [B, G, T, R] in `dtype`."""
    return stored["values"].astype(dtype)


def split(
    quantizer: Raw, stored: dict[str, mx.array], dims: int, page: int
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return the bits of the float16 numbers as uint16 [B, G, T, R], for page records."""
    return mx.contiguous(stored["values"]).view(mx.uint16), {}


def join(quantizer: Raw, codes: mx.array, numbers: dict[str, mx.array]) -> dict[str, mx.array]:
    """Invert `split`."""
    return {"values": mx.contiguous(codes.astype(mx.uint16)).view(mx.float16)}
