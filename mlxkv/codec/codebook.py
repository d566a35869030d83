"""Codebook codes (TurboQuant) by plain MLX ops: x ~ norm * levels[code]. Spec: `spec.codebook`.
Stored: `Codebook.tensors`."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from mlxkv.codec import packing
from mlxkv.codec.affine import half
from mlxkv.formats import levels
from mlxkv.formats.quantizers import Codebook


@cache
def _levels(dims: int, bits: int) -> mx.array:
    return mx.array(levels.sphere(dims, bits).astype(np.float32))


def encode(quantizer: Codebook, x: mx.array, page: int) -> dict[str, mx.array]:
    """Encode x [B, G, T, R], T a whole number of pages."""
    x, bits = x.astype(mx.float32), quantizer.bits
    table, middle = levels.sphere(x.shape[-1], bits), 2 ** (bits - 1)
    norm = mx.sqrt((x * x).sum(-1, keepdims=True))
    # Compare magnitudes, since levels are symmetric about 0; boundaries are scaled by the norm.
    size, steps = mx.abs(x), mx.zeros(x.shape, mx.uint32)
    for boundary in (table[1:] + table[:-1])[middle:] / 2:
        steps = steps + (size > float(boundary) * norm)
    codes = mx.where(x > 0, middle + steps, middle - 1 - steps)
    return {"codes": packing.pack(codes, bits), "scale": half(norm)}


def decode(
    quantizer: Codebook, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """Decode to [B, G, T, R] in `dtype`."""
    codes = packing.unpack(stored["codes"], quantizer.bits, dims)
    x = _levels(dims, quantizer.bits)[codes] * stored["scale"].astype(mx.float32)
    return x.astype(dtype)
