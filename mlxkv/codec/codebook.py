"""Codebook codes (TurboQuant) by plain MLX ops: x ~ norm * levels[code]. Spec: `spec.codebook`.
Stored: `Codebook.tensors`."""

from __future__ import annotations

from functools import cache
from math import pi, sqrt

import mlx.core as mx
import numpy as np

from mlxkv.codec import packing, transform
from mlxkv.codec.affine import half
from mlxkv.codec.transform import Transform
from mlxkv.formats import levels, matrices
from mlxkv.formats.codebook import Codebook


@cache
def _levels(dims: int, bits: int) -> mx.array:
    return mx.array(levels.sphere(dims, bits).astype(np.float32))


@cache
def _projections(dims: int, seed: int) -> mx.array:
    """[R, R] of the residual stage, one projection a column."""
    return mx.array(matrices.gaussian((dims, dims), seed).astype(np.float32))


def _norm(x: mx.array) -> mx.array:
    return mx.sqrt((x * x).sum(-1, keepdims=True))


def _encode(x: mx.array, bits: int, corrected: bool) -> tuple[mx.array, mx.array]:
    """x: [..., R] float32 -> codes uint32 [..., R], scale float16 [..., 1]."""
    table, middle = levels.sphere(x.shape[-1], bits), 2 ** (bits - 1)
    norm = _norm(x)
    # By sizes, which are as many levels on either side of 0; boundaries go with the norm.
    size, above = mx.abs(x), mx.zeros(x.shape, mx.uint32)
    for boundary in (table[1:] + table[:-1])[middle:] / 2:
        above = above + (size > float(boundary) * norm)
    codes = mx.where(x > 0, middle + above, middle - 1 - above)
    if corrected:
        norm = norm / _norm(_levels(x.shape[-1], bits)[codes])
    return codes, half(norm)


def _decode(words: mx.array, scale: mx.array, bits: int, dims: int) -> mx.array:
    """[..., R] float32."""
    return _levels(dims, bits)[packing.unpack(words, bits, dims)] * scale.astype(mx.float32)


def encode(spec: Codebook, x: mx.array, page: int) -> dict[str, mx.array]:
    """x: [B, G, T, R], T a whole number of pages."""
    x = x.astype(mx.float32)
    if spec.outliers:
        return _encode_parts(spec, x, page)
    dims, bits = x.shape[-1], spec.level_bits
    codes, scale = _encode(x, bits, spec.corrected)
    stored = {"codes": packing.pack(codes, bits), "scale": scale}
    if not spec.residual:
        return stored
    rest = x - _levels(dims, bits)[codes] * scale.astype(mx.float32)
    signs = rest @ _projections(dims, spec.seed) > 0
    return {**stored, "signs": packing.pack(signs, 1), "length": half(_norm(rest))}


def _signs(stored: dict[str, mx.array], dims: int) -> mx.array:
    """[B, G, T, R] of +-sqrt(pi / 2) / R; times the length, the estimate of the rest from its
    projections."""
    signs = packing.unpack(stored["signs"], 1, dims).astype(mx.float32)
    return (2 * signs - 1) * (sqrt(pi / 2) / dims)


def decode(
    spec: Codebook, stored: dict[str, mx.array], dims: int, page: int, dtype: mx.Dtype
) -> mx.array:
    """[B, G, T, R] in `dtype`."""
    if spec.outliers:
        return _decode_parts(spec, stored, dims, page).astype(dtype)
    x = _decode(stored["codes"], stored["scale"], spec.level_bits, dims)
    if spec.residual:
        turned = _signs(stored, dims) @ _projections(dims, spec.seed).T
        x = x + turned * stored["length"].astype(mx.float32)
    return x.astype(dtype)


def scores(
    spec: Codebook, q: mx.array, stored: dict[str, mx.array], dims: int, page: int
) -> mx.array:
    """q: [B, G, N, R] float32 -> q . x^ for every stored token: [B, G, N, T].

    The residual stage never leaves its signs: queries are projected instead.
    """
    if spec.outliers:
        return q @ _decode_parts(spec, stored, dims, page).swapaxes(-1, -2)
    x = _decode(stored["codes"], stored["scale"], spec.level_bits, dims)
    out = q @ x.swapaxes(-1, -2)
    if spec.residual:
        seen = (q @ _projections(dims, spec.seed)) @ _signs(stored, dims).swapaxes(-1, -2)
        out = out + seen * stored["length"].astype(mx.float32).swapaxes(-1, -2)
    return out


def mix(spec: Codebook, p: mx.array, stored: dict[str, mx.array], dims: int, page: int) -> mx.array:
    """p: [B, G, N, T] float32 -> sum_t p_t x^_t: [B, G, N, R]."""
    if spec.outliers:
        return p @ _decode_parts(spec, stored, dims, page)
    out = p @ _decode(stored["codes"], stored["scale"], spec.level_bits, dims)
    if spec.residual:
        weights = p * stored["length"].astype(mx.float32).swapaxes(-1, -2)
        out = out + weights @ _signs(stored, dims) @ _projections(dims, spec.seed).T
    return out


def with_signs(spec: Codebook, dims: int, turned: Transform | None) -> Transform:
    """A transform for queries alone: behind the stored domain of `turned`, the R numbers that the signs
    of a residual stage multiply. up: [2 R, D]."""
    return _with_signs(_unturned(dims) if turned is None else turned, spec.seed)


@cache
def _unturned(dims: int) -> Transform:
    return Transform(mx.eye(dims), mx.eye(dims))


@transform.kept_with
def _with_signs(turned: Transform, seed: int) -> Transform:
    up, dims = turned.up, turned.up.shape[-2]
    seen = _projections(dims, seed).T @ up * (sqrt(pi / 2) / dims)
    return Transform(up.swapaxes(-1, -2), mx.concatenate([up, seen], axis=-2))


# Outlier channels. The paper does not say when they are chosen. Here each page chooses its own: it
# needs nothing but itself, so a cache may be trimmed, saved and batched, and a bit per channel and
# page is 1/64 bit per value. Each part has a rotation of its own, of seed 0.


def _encode_parts(spec: Codebook, x: mx.array, page: int) -> dict[str, mx.array]:
    *lead, tokens, dims = x.shape
    pages = x.reshape(*lead, tokens // page, page, dims)
    energy = (pages * pages).sum(-2)
    order = mx.argsort(-energy, axis=-1)  # a stable sort: of equal ones the first
    few, _ = spec.parts(dims)
    chosen = mx.zeros(energy.shape, mx.uint32)
    one = mx.ones((*energy.shape[:-1], few[0]), mx.uint32)
    chosen = mx.put_along_axis(chosen, order[..., : few[0]], one, axis=-1)
    sorted_ = mx.take_along_axis(pages, _order(chosen)[..., None, :], axis=-1)
    stored, scales, start = {}, [], 0
    for name, (n, bits) in zip(("outliers", "codes"), spec.parts(dims), strict=True):
        part = sorted_[..., start : start + n].reshape(*lead, tokens, n)
        turned = transform.make("random", n, 0).store(part)
        codes, scale = _encode(turned, bits, spec.corrected)
        stored[name] = packing.pack(codes, bits)
        scales.append(scale)
        start += n
    return {**stored, "scale": mx.concatenate(scales, -1), "channels": packing.pack(chosen, 1)}


def _order(chosen: mx.array) -> mx.array:
    """[..., R] of 0 and 1 -> the channels that are 1, then the others, both in ascending order."""
    dims = chosen.shape[-1]
    return mx.argsort((1 - chosen.astype(mx.int32)) * dims + mx.arange(dims), axis=-1)


def _decode_parts(spec: Codebook, stored: dict[str, mx.array], dims: int, page: int) -> mx.array:
    """[B, G, T, R] float32."""
    parts = []
    for i, (name, (n, bits)) in enumerate(
        zip(("outliers", "codes"), spec.parts(dims), strict=True)
    ):
        turned = _decode(stored[name], stored["scale"][..., i : i + 1], bits, n)
        parts.append(transform.make("random", n, 0).restore(turned))
    x = mx.concatenate(parts, -1)
    *lead, tokens, _ = x.shape
    places = mx.argsort(_order(packing.unpack(stored["channels"], 1, dims)), axis=-1)
    pages = x.reshape(*lead, tokens // page, page, dims)
    return mx.take_along_axis(pages, places[..., None, :], axis=-1).reshape(x.shape)
