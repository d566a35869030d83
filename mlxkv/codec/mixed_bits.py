"""Mixed bits in plain MLX ops: x ~ scale * (code - (2^b - 1) / 2), b by block of 16 stored dims. Spec:
`spec.mixed_bits`. Stored: `MixedBits.tensors`."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlxkv.codec import packing
from mlxkv.codec.affine import half
from mlxkv.formats.quantizers import DIMS, GAINS, STEPS, MixedBits


@lru_cache(maxsize=256)
def _tables(widths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, per stored dim, the distance between levels for variance 1, the gain and half of the largest code.

    Each is [R] float32.
    """
    gains = np.array([GAINS[bits] for bits in widths])
    steps = gains * np.array([STEPS[bits] for bits in widths])
    middle = (2.0 ** np.array(widths) - 1) / 2
    steps, gains, middle = (x.astype(np.float32).repeat(DIMS) for x in (steps, gains, middle))
    return steps, gains, middle


def encode(quantizer: MixedBits, x: mx.array, page: int) -> dict[str, mx.array]:
    """Encode x [B, G, T, R], T a whole number of pages."""
    steps, gains, middle = map(mx.array, _tables(quantizer.widths))
    x = x.astype(mx.float32)
    scale = half(mx.sqrt(mx.square(x * steps).mean(-1, keepdims=True)))
    step = scale.astype(mx.float32)
    codes = mx.round(x * gains / mx.where(step > 0, step, 1.0) + middle)
    codes = mx.minimum(mx.maximum(codes, 0), 2 * middle).astype(mx.uint32)
    return {"codes": packed(quantizer, codes), "scale": scale}


def packed(quantizer: MixedBits, codes: mx.array) -> mx.array:
    """Pack codes [..., R] into words [..., W], run by run of equal width; a run is a whole number of half words."""
    parts: list[mx.array] = []
    start = 0
    for bits, count in quantizer.runs:
        words = packing.pack(codes[..., start : start + count], bits)
        parts.append(mx.contiguous(words).view(mx.uint16)[..., : count * bits // 16])
        start += count
    halves = mx.concatenate(parts, -1)
    if halves.shape[-1] % 2:
        halves = mx.pad(halves, [(0, 0)] * (halves.ndim - 1) + [(0, 1)])
    return mx.contiguous(halves).view(mx.uint32)


def unpacked(quantizer: MixedBits, words: mx.array) -> mx.array:
    """Invert `packed`: [..., R] uint32."""
    halves, start = mx.contiguous(words).view(mx.uint16), 0
    parts: list[mx.array] = []
    for bits, count in quantizer.runs:
        size = count * bits // 16
        part = halves[..., start : start + size]
        if size % 2:
            part = mx.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, 1)])
        parts.append(packing.unpack(mx.contiguous(part).view(mx.uint32), bits, count))
        start += size
    return mx.concatenate(parts, -1)


def split(
    quantizer: MixedBits, stored: dict[str, mx.array], dims: int, page: int
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return codes [B, G, T, R], one per stored dim, and the other tensors."""
    return unpacked(quantizer, stored["codes"]), stored


def join(
    quantizer: MixedBits, codes: mx.array, numbers: dict[str, mx.array]
) -> dict[str, mx.array]:
    """Invert `split`."""
    return {"codes": packed(quantizer, codes), **numbers}


def _levels(quantizer: MixedBits, stored: dict[str, mx.array]) -> mx.array:
    """Return values divided by the scale of their token, [B, G, T, R] float32."""
    middle = mx.array(_tables(quantizer.widths)[2])
    return unpacked(quantizer, stored["codes"]).astype(mx.float32) - middle


def decode(
    quantizer: MixedBits, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """Decode to [B, G, T, R] in `dtype`."""
    return (_levels(quantizer, stored) * stored["scale"].astype(mx.float32)).astype(dtype)


def scores(
    quantizer: MixedBits, q: mx.array, stored: dict[str, mx.array], dims: int, page: int
) -> mx.array:
    """Return q . x^ for every stored token, [B, G, N, T], of q [B, G, N, R] float32."""
    scale = stored["scale"].astype(q.dtype).swapaxes(-1, -2)
    return q @ _levels(quantizer, stored).swapaxes(-1, -2) * scale


def mix(
    quantizer: MixedBits, p: mx.array, stored: dict[str, mx.array], dims: int, page: int
) -> mx.array:
    """Return sum_t p_t x^_t, [B, G, N, R], of p [B, G, N, T] float32."""
    scale = stored["scale"].astype(p.dtype).swapaxes(-1, -2)
    return (p * scale) @ _levels(quantizer, stored)
