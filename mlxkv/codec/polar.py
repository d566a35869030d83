"""PolarQuant (Wu et al.) by plain MLX ops: pairs of dims as radius and angle. Spec:
`spec.polar`. Stored: `Polar.tensors`."""

from __future__ import annotations

from math import tau

import mlx.core as mx

from mlxkv.codec import packing
from mlxkv.codec.affine import half
from mlxkv.formats.quantizers import HALF_MAX, Polar
from mlxkv.formats.quantizers import POLAR_NUMBERS as NUMBERS

TABLE_ROWS = 4  # up to this many query rows, look-ups are cheaper than decoding keys and a product


def _halves(x: mx.array) -> list[mx.array]:
    return x.split(2, axis=-1)


def _radius(a: mx.array, b: mx.array) -> mx.array:
    """Compute `hypot` without squaring large values, which would overflow float32."""
    large = mx.maximum(mx.abs(a), mx.abs(b))
    small = mx.minimum(mx.abs(a), mx.abs(b)) / mx.where(large > 0, large, 1.0)
    return large * mx.sqrt(1.0 + small * small)


def _steps(x: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """[..., page, n] -> codes, step, low."""
    low = half(x.min(-2, keepdims=True))
    start = low.astype(mx.float32)
    step = half(mx.maximum(x.max(-2, keepdims=True) - start, 0.0) / 2**bits)
    size = step.astype(mx.float32)
    codes = mx.floor((x - start) / mx.where(size > 0, size, 1.0))
    return mx.clip(codes, 0, 2**bits - 1).astype(mx.uint32), step, low


def encode(quantizer: Polar, x: mx.array, page: int) -> dict[str, mx.array]:
    """Encode x [B, G, T, R], T a whole number of pages."""
    a, b = _halves(_tiles(x.astype(mx.float32), page))
    angle = mx.arctan2(b, a)
    angle = mx.where(angle < 0, angle + tau, angle)
    rho, *radii = _steps(_radius(a, b), quantizer.radius)
    phi, *angles = _steps(angle, quantizer.angle)
    codes = _rows((rho << quantizer.angle) + phi)
    numbers = zip(NUMBERS, map(_rows, (*radii, *angles)), strict=True)
    return {"codes": packing.pack(codes, quantizer.pair_bits), **dict(numbers)}


def _tiles(x: mx.array, page: int) -> mx.array:
    """[B, G, T, n] -> [B, G, P, page, n]."""
    return mx.reshape(x, (*x.shape[:2], -1, page, x.shape[3]))


def _rows(x: mx.array) -> mx.array:
    """[B, G, P, m, n] -> [B, G, P m, n]."""
    return mx.reshape(x, (*x.shape[:2], -1, x.shape[4]))


def _codes(quantizer: Polar, stored: dict[str, mx.array], dims: int, page: int):
    """Return the radius [B, G, P, page, R/2], float32, and the codes of the angle."""
    codes = _tiles(packing.unpack(stored["codes"], quantizer.pair_bits, dims // 2), page)
    step, low = (stored[n][:, :, :, None].astype(mx.float32) for n in NUMBERS[:2])
    return low + ((codes >> quantizer.angle).astype(mx.float32) + 0.5) * step, codes & (
        2**quantizer.angle - 1
    )


def _angles(stored: dict[str, mx.array], codes: mx.array) -> mx.array:
    """codes: [..., page or 2^angle, R/2] -> angles."""
    step, low = (stored[n][:, :, :, None].astype(mx.float32) for n in NUMBERS[2:])
    return low + (codes.astype(mx.float32) + 0.5) * step


def decode(
    quantizer: Polar, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """Decode to [B, G, T, R] in `dtype`."""
    radius, codes = _codes(quantizer, stored, dims, page)
    # One cosine and sine per angle code, not per token.
    angles = _angles(stored, _codes_of_angles(quantizer))
    parts = (
        radius * mx.take_along_axis(table, codes, axis=3)
        for table in (mx.cos(angles), mx.sin(angles))
    )
    x = _rows(mx.concatenate(list(parts), axis=-1))
    if dtype == mx.float16:  # the middle of a step may overflow
        x = mx.clip(x, -HALF_MAX, HALF_MAX)
    return x.astype(dtype)


def _codes_of_angles(quantizer: Polar) -> mx.array:
    """Return every angle code, [2^angle, 1]."""
    return mx.arange(2**quantizer.angle)[:, None]


def scores(
    quantizer: Polar, q: mx.array, stored: dict[str, mx.array], dims: int, page: int
) -> mx.array:
    """Return q . x^ for every stored token, [B, G, N, T], of q [B, G, N, R] float32."""
    if q.shape[2] > TABLE_ROWS:
        return q @ decode(quantizer, stored, dims, page, q.dtype).swapaxes(-1, -2)
    return scores_by_tables(quantizer, q, stored, dims, page)


def scores_by_tables(
    quantizer: Polar, q: mx.array, stored: dict[str, mx.array], dims: int, page: int
) -> mx.array:
    """Compute `scores` without decoding keys.

    Per page and pair, a table of q (cos, sin) for every angle code is gathered by the codes and multiplied by the
    radius.
    """
    radius, codes = _codes(quantizer, stored, dims, page)
    angles = _angles(stored, _codes_of_angles(quantizer))  # [B, G, P, 2^angle, R/2]
    cos, sin = mx.cos(angles), mx.sin(angles)
    out: list[mx.array] = []
    # Row by row: each gathers as many values as the keys contain.
    for row in q.split(q.shape[2], axis=2):
        a, b = _halves(row[:, :, None])  # [B, G, 1, 1, R/2]
        gathered = mx.take_along_axis(a * cos + b * sin, codes, axis=3)
        out.append(mx.reshape((gathered * radius).sum(-1), (*q.shape[:2], 1, -1)))
    return mx.concatenate(out, axis=2)


def split(
    quantizer: Polar, stored: dict[str, mx.array], dims: int, page: int
) -> tuple[mx.array, dict[str, mx.array]]:
    """Return codes [B, G, T, R], all radii before all angles, and the other tensors."""
    codes = packing.unpack(stored["codes"], quantizer.pair_bits, dims // 2)
    return mx.concatenate(
        [codes >> quantizer.angle, codes & (2**quantizer.angle - 1)], axis=-1
    ), stored


def join(quantizer: Polar, codes: mx.array, numbers: dict[str, mx.array]) -> dict[str, mx.array]:
    """Invert `split`."""
    radii, angles = _halves(codes)
    return {
        "codes": packing.pack((radii << quantizer.angle) + angles, quantizer.pair_bits),
        **numbers,
    }
