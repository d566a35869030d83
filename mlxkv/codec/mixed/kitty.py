"""Kitty by plain MLX ops: min-max codes per channel of a page, wider for the largest channels. Spec:
`spec.mixed.kitty`. Stored: `Kitty.tensors`."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.codec import packing
from mlxkv.codec.affine import half
from mlxkv.formats.tile import Kitty


def _order(pages: mx.array, count: int) -> mx.array:
    """[B, G, P, T, R] -> [B, G, P, count] channels of the largest mean |x|, ascending. The sort is stable: of
    equal ones the first."""
    size = mx.abs(pages).mean(-2)
    return mx.sort(mx.argsort(-size, axis=-1)[..., :count], axis=-1)


def encode(spec: Kitty, x: mx.array, page: int) -> dict[str, mx.array]:
    """x: [B, G, T, R], T a whole number of pages."""
    *lead, tokens, dims = x.shape
    pages = x.astype(mx.float32).reshape(*lead, tokens // page, page, dims)
    at = _order(pages, spec.count(dims))
    ones = mx.ones(at.shape, mx.uint32)
    chosen = mx.put_along_axis(mx.zeros((*at.shape[:-1], dims), mx.uint32), at, ones, axis=-1)
    top = mx.where(chosen > 0, spec.most, spec.least).astype(mx.float32)
    bias = half(pages.min(-2))
    scale = half((pages.max(-2) - bias.astype(mx.float32)) / top)
    step = scale.astype(mx.float32)[..., None, :]
    codes = (pages - bias.astype(mx.float32)[..., None, :]) / mx.where(step > 0, step, 1.0)
    codes = mx.minimum(mx.maximum(mx.round(codes), 0), top[..., None, :]).astype(mx.uint32)
    high = mx.where(chosen[..., None, :] > 0, codes >> spec.bits, codes)
    low = mx.take_along_axis(codes, at[..., None, :], axis=-1) & spec.least
    return {
        "codes": packing.pack(high.reshape(*lead, tokens, dims), spec.bits),
        "more": packing.pack(low.reshape(*lead, tokens, -1), spec.bits),
        "channels": packing.pack(chosen, 1),
        "scale": scale,
        "bias": bias,
    }


def _decode(spec: Kitty, stored: dict[str, mx.array], dims: int, page: int) -> mx.array:
    """[B, G, T, R] float32."""
    high = packing.unpack(stored["codes"], spec.bits, dims)
    low = packing.unpack(stored["more"], spec.bits, spec.count(dims))
    chosen = packing.unpack(stored["channels"], 1, dims)[..., None, :]  # [B, G, P, 1, R]
    *lead, tokens, _ = high.shape
    high, low = (y.reshape(*lead, tokens // page, page, -1) for y in (high, low))
    place = mx.maximum(mx.cumsum(chosen.astype(mx.int32), axis=-1) - 1, 0)
    low = mx.take_along_axis(low, place, axis=-1)
    codes = mx.where(chosen > 0, (high << spec.bits) + low, high).astype(mx.float32)
    scale, bias = (stored[n].astype(mx.float32)[..., None, :] for n in ("scale", "bias"))
    return (codes * scale + bias).reshape(*lead, tokens, dims)


def decode(
    spec: Kitty, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """[B, G, T, R] in `dtype`."""
    return _decode(spec, stored, dims, page).astype(dtype)


def scores(spec: Kitty, q: mx.array, stored: dict[str, mx.array], dims: int, page: int) -> mx.array:
    """q: [B, G, N, R] float32 -> q . x^ for every stored token: [B, G, N, T]."""
    return q @ _decode(spec, stored, dims, page).swapaxes(-1, -2)


def mix(spec: Kitty, p: mx.array, stored: dict[str, mx.array], dims: int, page: int) -> mx.array:
    """p: [B, G, N, T] float32 -> sum_t p_t x^_t: [B, G, N, R]."""
    return p @ _decode(spec, stored, dims, page)
