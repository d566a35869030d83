"""Parametrise learned maps: rotations and scales as functions of free parameters. Spec: `spec/learned.py`.

All for `G` kv heads at once, in float32 by plain MLX ops with gradients; `D` head dim, `K` reflectors.
"""

from __future__ import annotations

from math import log

import mlx.core as mx
import numpy as np

from mlxkv.formats.calibration.learned import Learned

LARGEST = 1024.0  # scale; the smallest is its inverse
# exp(A) = (Taylor series of A / 2^SQUARINGS to DEGREE) ^ 2^SQUARINGS. The error is 1e-6 at angles of 10
# radians, more than any that is needed.
SQUARINGS, DEGREE = 5, 6
LEAST = 1e-12  # squared length
Params = dict[str, mx.array]


def start(learned: Learned, heads: int, dims: int) -> Params:
    """Parameters of the identity, so that learning starts at the base alone."""
    out = {}
    if learned.rotation == "rotation":
        out["rotation"] = mx.zeros((heads, dims, dims))
    if learned.rotation == "householder":
        half = np.random.default_rng(0).standard_normal((heads, reflectors(dims) // 2, dims))
        half /= np.linalg.norm(half, axis=-1, keepdims=True)
        # A pair of equal reflectors is the identity, and a rotation as soon as they differ.
        out["householder"] = mx.array(half.repeat(2, axis=1).astype(np.float32))
    if learned.scaled:
        out["scale"] = mx.zeros((heads, dims))
    return out


def pair(params: Params, base: mx.array) -> tuple[mx.array, mx.array]:
    """(down, up) [G, D, D] behind an orthogonal base [D, D]: stored = x @ down, x = stored @ up."""
    down = base[None]
    if "rotation" in params:
        down = down @ exponential(params["rotation"])
    if "householder" in params:
        down = reflected(down, params["householder"])
    up = down.swapaxes(-1, -2)
    if "scale" in params:
        by = scale(params["scale"])
        down, up = down * by[:, None], up / by[..., None]
    return down, up


def exponential(free: mx.array) -> mx.array:
    """Rotations exp(L - L^T) [G, D, D], L the strict lower triangle of free [G, D, D]."""
    lower = mx.tril(free, -1)
    small = (lower - lower.swapaxes(-1, -2)) / 2**SQUARINGS
    eye = mx.eye(free.shape[-1])
    out = eye + small / DEGREE
    for i in range(DEGREE - 1, 0, -1):
        out = eye + small @ out / i
    for _ in range(SQUARINGS):
        out = out @ out
    return out


def reflected(x: mx.array, vectors: mx.array) -> mx.array:
    """x [G or 1, D, D] times the product of the reflectors of vectors [G, K, D], in their order.

    Products are held as I - W^T Y (Bischof and Van Loan 1987) and joined in pairs, in log2(K) rounds:
    one reflector after the other would be hundreds of tiny products.
    """
    heads, count, dims = vectors.shape
    y = mx.pad(vectors, [(0, 0), (0, 2 ** (count - 1).bit_length() - count), (0, 0)])
    w = y * (2 / mx.maximum((y * y).sum(-1, keepdims=True), LEAST))  # of padding: zeros
    w, y = (one[:, :, None] for one in (w, y))  # [G, blocks, reflectors of a block, D]
    while w.shape[1] > 1:
        first, second, over = w[:, ::2], w[:, 1::2], y[:, ::2]
        second = second - (second @ over.swapaxes(-1, -2)) @ first
        w = mx.concatenate([first, second], axis=2)
        y = mx.concatenate([over, y[:, 1::2]], axis=2)
    return x - (x @ w[:, 0].swapaxes(-1, -2)) @ y[:, 0]


def reflectors(dims: int) -> int:
    """K: half of dims, rounded up to an even number."""
    return 2 * -(-dims // 4)


def scale(free: mx.array) -> mx.array:
    """Positive scales [G, D] with a geometric mean of 1, from free [G, D]."""
    bound = log(LARGEST)
    return mx.exp(mx.clip(free - free.mean(-1, keepdims=True), -bound, bound))
