"""Affine codes by plain MLX ops: x ~ scale * code + bias. Spec: `spec.affine`. Stored: `Affine.tensors`."""

from __future__ import annotations

import shutil
import sys
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx

from mlxkv.codec import packing
from mlxkv.formats.quantizers import HALF_MAX, Affine

# Formats that MLX's quantized products support (`mx.quantize`, affine mode).
MLX_GROUPS = (32, 64, 128)
CPU_ROWS = 16
PLANE_TOKENS = 1024  # from here on, plane products on a CPU are faster than MLX's quantized product
FOLDED = 32  # stored dims that share a scale of 1, with the scales folded into the queries
Stored = dict[str, mx.array]
_Part = tuple[int, Stored]  # dims and their tensors
CUDA_ROWS = 65535  # CUDA's limit of a grid's second dimension


def _grouped(x: mx.array, group: int, axis: str) -> mx.array:
    """Put groups of [..., T, R] on the last axis.

    Token: [..., T, ceil(R/g), g], a short last group padded with its last value. Channel: [..., T/g, R, g].
    """
    *lead, tokens, dims = x.shape
    if axis == "token":
        if dims % group:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -dims % group)], mode="edge")
        return mx.reshape(x, (*lead, tokens, -1, group))
    return mx.reshape(x, (*lead, tokens // group, group, dims)).swapaxes(-1, -2)


def _ungrouped(x: mx.array, axis: str, dims: int) -> mx.array:
    if axis == "channel":
        x = x.swapaxes(-1, -2)
        return mx.reshape(x, (*x.shape[:-3], -1, x.shape[-1]))
    return mx.reshape(x, (*x.shape[:-2], -1))[..., :dims]


def half(x: mx.array, limit: float = HALF_MAX) -> mx.array:
    """Clip x to +-limit and convert it to float16."""
    return mx.clip(x, -limit, limit).astype(mx.float16)


def rows_at_once() -> int:
    """Return the most rows that MLX can sort in one call: on CUDA its grid is (1, rows)."""
    on_cuda = mx.cuda.is_available() and mx.default_device() == mx.gpu
    return CUDA_ROWS if on_cuda else sys.maxsize


def clip_rows(x: mx.array, rank: int) -> mx.array:
    """Clip each row of x [..., R] to its rank-th largest absolute value (`Affine.clip_rank`; 1: no clipping).

    Spec: `spec.affine.clip_rows`.
    """
    if rank == 1:
        return x
    rows = x.size // x.shape[-1]
    if rows > (rows_each := rows_at_once()):
        parts = mx.reshape(x, (rows, -1)).split(tuple(range(rows_each, rows, rows_each)))
        return mx.reshape(mx.concatenate([clip_rows(part, rank) for part in parts]), x.shape)
    size, at = mx.abs(x), x.shape[-1] - rank
    limit = mx.partition(size, at, axis=-1)[..., at : at + 1]  # selects, does not sort, on the CPU
    return mx.clip(x, -limit, limit)


def encode(quantizer: Affine, x: mx.array, page: int) -> Stored:
    """Encode x [B, G, T, R], T a whole number of pages."""
    form, x = _form(quantizer, x.shape[-1], page), x.astype(mx.float32)
    if form.rank > 1:
        x = clip_rows(x, form.rank)
    g = _grouped(x, form.group, quantizer.axis)
    top = 2**quantizer.bits - 1
    middle = 2 ** (quantizer.bits - 1)
    if quantizer.symmetric:
        peak = mx.abs(g).max(-1)
        peak = _of_pages(peak, page) if quantizer.shared else peak
        scale = half(peak / (middle - 1), HALF_MAX / middle)
        bias, low = scale.astype(mx.float32) * -middle, 1
        stored = {"scale": scale}
    else:
        stored_bias = half(g.min(-1))
        bias, low = stored_bias.astype(mx.float32), 0
        scale = half((g.max(-1) - bias) / top)
        stored = {"scale": scale, "bias": stored_bias}
    step = scale.astype(mx.float32)
    codes = (g - bias[..., None]) / mx.where(step > 0, step, 1.0)[..., None]
    codes = mx.clip(mx.round(codes), low, top)
    if quantizer.symmetric:
        codes = mx.where(step[..., None] > 0, codes, middle)
    words = packing.pack(
        _ungrouped(codes, quantizer.axis, x.shape[-1]).astype(mx.uint32), quantizer.bits
    )
    return {"codes": words, **stored}


def _of_pages(peaks: mx.array, page: int) -> mx.array:
    """Return the maximum over kv heads and tokens of each page, broadcast to [B, G, T, 1]."""
    pages = mx.reshape(peaks, (*peaks.shape[:2], -1, page))
    return mx.reshape(mx.broadcast_to(pages.max((1, 3), keepdims=True), pages.shape), peaks.shape)


def _bias(quantizer: Affine, stored: Stored) -> mx.array:
    """Return the bias of every group. If symmetric, it is a power of two times the scale, exact in float16."""
    return stored["scale"] * -(2 ** (quantizer.bits - 1)) if quantizer.symmetric else stored["bias"]


class _Form(NamedTuple):
    """How pages of a format are encoded and read.

    group: group size. rank: `Affine.clip_rank`. mlx: whether MLX's products support all groups; tail: all but the
    short last one. folds: whether scales per channel can be folded into the queries, leaving codes that MLX
    multiplies.
    """

    group: int
    rank: int
    mlx: bool
    tail: bool
    folds: bool


@lru_cache(maxsize=256)
def _form(quantizer: Affine, dims: int, page: int) -> _Form:
    group, by_token = quantizer.group_size(dims, page), quantizer.axis == "token"
    read = by_token and group in MLX_GROUPS
    return _Form(
        group,
        quantizer.clip_rank(dims),
        mlx=read and not dims % group,
        tail=read and dims % group > 0,
        folds=not by_token and not dims % FOLDED,
    )


def _cut(quantizer: Affine, group: int, stored: Stored, dims: int) -> tuple[_Part, _Part]:
    """Return (dims, arrays) of the whole groups, and of the short one: 64 and 16 for 80 dims."""
    split = dims - dims % group
    head: Stored = {}
    tail: Stored = {}
    for name, x in stored.items():
        at = split * quantizer.bits // 32 if name == "codes" else split // group
        head[name], tail[name] = x[..., :at], x[..., at:]
    return (split, head), (dims - split, tail)


def decode(quantizer: Affine, stored: Stored, dims: int, page: int, dtype: mx.Dtype) -> mx.array:
    """Decode to [B, G, T, R] in `dtype`."""
    form = _form(quantizer, dims, page)
    if form.tail:
        parts = _cut(quantizer, form.group, stored, dims)
        return mx.concatenate([decode(quantizer, s, n, page, dtype) for n, s in parts], axis=-1)
    codes, scale, bias = stored["codes"], stored["scale"], _bias(quantizer, stored)
    if form.mlx:
        if dtype == mx.float32:  # MLX decodes in the type of the scales
            scale, bias = scale.astype(dtype), bias.astype(dtype)
        return mx.dequantize(
            codes, scale, bias, group_size=form.group, bits=quantizer.bits, dtype=dtype
        )
    g = _grouped(
        packing.unpack(codes, quantizer.bits, dims).astype(mx.float32), form.group, quantizer.axis
    )
    return _ungrouped(g * scale[..., None] + bias[..., None], quantizer.axis, dims).astype(dtype)


def scores(quantizer: Affine, q: mx.array, stored: Stored, dims: int, page: int) -> mx.array:
    """Return q . x^ for every stored token, [B, G, N, T], of q [B, G, N, R] float32."""
    return _product(quantizer, q, stored, dims, page, transpose=True)


def mix(quantizer: Affine, p: mx.array, stored: Stored, dims: int, page: int) -> mx.array:
    """Return sum_t p_t x^_t, [B, G, N, R], of p [B, G, N, T] float32."""
    return _product(quantizer, p, stored, dims, page, transpose=False)


def _product_pays(rows: int) -> bool:
    """Return whether MLX's quantized product for `rows` rows exists and is cheaper than decoding first.

    On the CPU its time grows with every row; on CUDA it does not exist for some shapes.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return rows < CPU_ROWS
    return mx.metal.is_available()


def _splits(quantizer: Affine, tokens: int) -> bool:
    """Return whether scores of `tokens` tokens are computed by `_plane_scores`.

    Only on a CPU with the compiler that MLX fuses ops with: without it, splitting words takes longer than MLX's
    product, row by row.
    """
    if tokens < PLANE_TOKENS or 32 % quantizer.bits or mx.default_device() != mx.Device(mx.cpu):
        return False
    return _has_compiler()


@cache
def _has_compiler() -> bool:
    return shutil.which("g++") is not None


def _plane_scores(
    quantizer: Affine, q: mx.array, stored: Stored, dims: int, group: int
) -> mx.array:
    """Compute `_product`, where `_splits` holds, from codes centred on the middle of their range.

    q . (scale * code + bias) = (q * scale) . (code - middle) + q . (bias + middle * scale).
    """
    codes, scale = stored["codes"], stored["scale"].astype(q.dtype)
    offset = None
    if not quantizer.symmetric:
        offset = stored["bias"].astype(q.dtype) + scale * 2 ** (quantizer.bits - 1)
    if quantizer.axis == "channel":  # queries scaled per group of tokens, [B, G, T/g, N, R]
        codes = mx.reshape(codes, (*codes.shape[:2], -1, group, codes.shape[-1]))
        out = _plane_products(q[:, :, None] * scale[:, :, :, None], codes, quantizer.bits)
        out = out.swapaxes(2, 3)  # [B, G, N, T/g, g]
        if offset is not None:
            out = out + (q @ offset.swapaxes(-1, -2))[..., None]
        return mx.reshape(out, (*out.shape[:3], -1))
    q = mx.reshape(q, (*q.shape[:3], -1, group)).swapaxes(2, 3)  # [B, G, R/g, N, g]
    codes = mx.reshape(codes, (*codes.shape[:3], dims // group, -1)).swapaxes(2, 3)
    out = _plane_products(q, codes, quantizer.bits) * scale.swapaxes(-1, -2)[:, :, :, None]
    if offset is not None:
        out = out + q.sum(-1, keepdims=True) * offset.swapaxes(-1, -2)[:, :, :, None]
    return sum((out[:, :, i] for i in range(1, out.shape[2])), out[:, :, 0])


def _plane_products(x: mx.array, codes: mx.array, bits: int) -> mx.array:
    """Multiply x [..., N, R] float32 with codes [..., T, W] (words), centred on the middle of their range: [..., N, T].

    One float product per place in a word, with tokens contiguous in memory, which halves the time of a plain BLAS.
    """
    words = mx.contiguous(codes.swapaxes(-1, -2))
    places = mx.reshape(x, (*x.shape[:-1], words.shape[-2], -1))
    places = mx.contiguous(mx.moveaxis(places, -1, 0))
    pairs = zip(places, packing.planes(bits)(words), strict=True)
    place, plane = next(pairs)
    out = place @ plane
    for place, plane in pairs:
        out = mx.addmm(out, place, plane)
    return out


def _folded_scores(
    quantizer: Affine, q: mx.array, stored: Stored, dims: int, group: int
) -> mx.array:
    """Compute q . (scale * code + bias) = (q * scale) . code + q . bias, scales per channel and group of tokens."""
    codes = stored["codes"]
    codes = mx.reshape(codes, (*codes.shape[:2], -1, group, codes.shape[-1]))  # [B, G, T/g, g, W]
    scale, bias = stored["scale"].astype(q.dtype), _bias(quantizer, stored).astype(q.dtype)
    ones = mx.ones((*codes.shape[:4], dims // FOLDED), q.dtype)
    q_scaled = q[:, :, None] * scale[:, :, :, None]  # [B, G, T/g, N, D]
    out = mx.quantized_matmul(
        *(q_scaled, codes, ones, mx.zeros_like(ones)), group_size=FOLDED, bits=quantizer.bits
    )
    out = out.swapaxes(2, 3) + (q @ bias.swapaxes(-1, -2))[..., None]  # [B, G, N, T/g, g]
    return mx.reshape(out, (*out.shape[:3], -1))


def _folded_mix(quantizer: Affine, p: mx.array, stored: Stored, dims: int, group: int) -> mx.array:
    """Compute sum_t p_t (scale * code + bias), scales per channel and group of tokens.

    Scales apply to the sum of each group, so no codes are decoded. Codes are centred on the middle of their range,
    for less cancellation.
    """
    codes, middle = stored["codes"], 2 ** (quantizer.bits - 1)
    codes = mx.reshape(codes, (*codes.shape[:2], -1, group, codes.shape[-1]))  # [B, G, T/g, g, W]
    scale = stored["scale"].astype(p.dtype)
    ones = mx.ones((*codes.shape[:4], dims // FOLDED), p.dtype)
    p = mx.reshape(p, (*p.shape[:3], -1, group)).swapaxes(2, 3)  # [B, G, T/g, N, g]
    out = mx.quantized_matmul(
        *(p, codes, ones, -middle * ones), transpose=False, group_size=FOLDED, bits=quantizer.bits
    )  # [B, G, T/g, N, R]
    out = (out * scale[:, :, :, None]).sum(2)
    if quantizer.symmetric:
        return out
    return out + p.sum(-1).swapaxes(2, 3) @ (stored["bias"].astype(p.dtype) + middle * scale)


def _product(
    quantizer: Affine,
    x: mx.array,
    stored: Stored,
    dims: int,
    page: int,
    transpose: bool,
) -> mx.array:
    form = _form(quantizer, dims, page)
    if form.tail:
        (split, head), (tail_dims, tail) = _cut(quantizer, form.group, stored, dims)
        if transpose:
            head_product = _product(quantizer, x[..., :split], head, split, page, True)
            return head_product + _product(quantizer, x[..., split:], tail, tail_dims, page, True)
        head_product = _product(quantizer, x, head, split, page, False)
        return mx.concatenate(
            [head_product, _product(quantizer, x, tail, tail_dims, page, False)], axis=-1
        )
    if transpose and (form.mlx or form.folds) and _splits(quantizer, stored["codes"].shape[2]):
        return _plane_scores(quantizer, x, stored, dims, form.group)
    rows = x.shape[-2]
    pays = (form.mlx or transpose and form.folds) and _product_pays(rows)
    if pays and form.mlx:
        return mx.quantized_matmul(
            x,
            stored["codes"],
            stored["scale"],
            _bias(quantizer, stored),
            transpose=transpose,
            group_size=form.group,
            bits=quantizer.bits,
        )
    if pays:
        return _folded_scores(quantizer, x, stored, dims, form.group)
    # One sum per group of tokens: less memory than decoded values.
    if not transpose and form.folds and 2 * rows <= form.group and _product_pays(rows):
        return _folded_mix(quantizer, x, stored, dims, form.group)
    decoded = decode(quantizer, stored, dims, page, x.dtype)
    return x @ (decoded.swapaxes(-1, -2) if transpose else decoded)
