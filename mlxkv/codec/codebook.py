"""Codebook codes (TurboQuant) by plain MLX ops: x ~ norm * levels[code]. Spec: `spec.codebook`.
Stored: `Codebook.tensors`."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from mlxkv.codec import packing
from mlxkv.codec.affine import half
from mlxkv.formats import levels
from mlxkv.formats.codebook import Codebook


@cache
def _levels(dims: int, bits: int) -> mx.array:
    return mx.array(levels.sphere(dims, bits).astype(np.float32))


def _norm(x: mx.array) -> mx.array:
    return mx.sqrt((x * x).sum(-1, keepdims=True))


def _encode(x: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """x: [..., R] float32 -> codes uint32 [..., R], scale float16 [..., 1]."""
    table, middle = levels.sphere(x.shape[-1], bits), 2 ** (bits - 1)
    norm = _norm(x)
    # By sizes, which are as many levels on either side of 0; boundaries go with the norm.
    size, steps = mx.abs(x), mx.zeros(x.shape, mx.uint32)
    for boundary in (table[1:] + table[:-1])[middle:] / 2:
        steps = steps + (size > float(boundary) * norm)
    codes = mx.where(x > 0, middle + steps, middle - 1 - steps)
    return codes, half(norm)


def encode(spec: Codebook, x: mx.array, page: int) -> dict[str, mx.array]:
    """x: [B, G, T, R], T a whole number of pages."""
    codes, scale = _encode(x.astype(mx.float32), spec.bits)
    return {"codes": packing.pack(codes, spec.bits), "scale": scale}


def decode(
    spec: Codebook, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """[B, G, T, R] in `dtype`."""
    codes = packing.unpack(stored["codes"], spec.bits, dims)
    x = _levels(dims, spec.bits)[codes] * stored["scale"].astype(mx.float32)
    return x.astype(dtype)
