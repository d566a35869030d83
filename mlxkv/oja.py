"""Bases of low rank that follow the text: Oja's rule, and who may teach it. Spec: `reference_oja`.

U: [B, G, D, R] float32, orthonormal columns. Factorisations run on the CPU, where MLX has them.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlxkv.calibrated import Rotations
from mlxkv.config import CacheConfig
from mlxkv.transform import Transform

RIDGE = 0.1  # as in the spec
TINY = float(np.finfo(np.float32).tiny)
Pair = tuple[mx.array, mx.array]


def orthonormal(a: mx.array) -> mx.array:
    """Q of A = QR [..., D, R], the diagonal of R positive."""
    q, r = mx.linalg.qr(a.astype(mx.float32), stream=mx.cpu)
    positive = mx.diagonal(r, axis1=-2, axis2=-1) >= 0
    return q * mx.where(positive, 1.0, -1.0)[..., None, :]


def update(u: mx.array, x: mx.array, rate: float, raw: bool = False) -> mx.array:
    """U after a batch x [B, G, N, D]. Where the batch holds NaN or infinity U stays as it is."""
    with mx.stream(mx.cpu):
        x = x.astype(mx.float32)
        y = x @ u
        step = (x - y @ u.swapaxes(-1, -2)).swapaxes(-1, -2) @ y
        if not raw:
            moment = y.swapaxes(-1, -2) @ y
            mean = mx.diagonal(moment, axis1=-2, axis2=-1).mean(-1)[..., None, None]
            moment = moment + (RIDGE * mean + TINY) * mx.eye(u.shape[-1])
            # A factorisation of NaN is an error in LAPACK: what is not sound does not get there.
            sound = mx.isfinite(moment).all((-1, -2), keepdims=True)
            moment = mx.where(sound, moment, mx.eye(u.shape[-1]))
            step = mx.linalg.solve(moment, step.swapaxes(-1, -2)).swapaxes(-1, -2)
        made = u + rate * step
        sound = mx.isfinite(made).all((-1, -2), keepdims=True)
        return mx.where(sound, orthonormal(mx.where(sound, made, u)), u)


def taught(
    now: Rotations, config: CacheConfig, batch: Pair, prompt: bool, heads: tuple[int, int]
) -> Rotations:
    """`now` after a batch of keys and values [B, G, N, D], of a prompt or decoded. heads: (B, G)."""
    made = {}
    for name, x in zip(("keys", "values"), batch, strict=True):
        side = getattr(config, name)
        if not side.follows:
            continue
        rate = side.low.prefill_rate if prompt else side.low.decode_rate
        if rate:
            made[name] = following(update(whole(getattr(now, name), heads), x, rate, side.low.raw))
    return replace(now, **made) if made else now


def whole(transform: Transform, heads: tuple[int, int]) -> mx.array:
    """Its U for every one of (B, G)."""
    down = transform.down
    return mx.broadcast_to(down, (*heads, *down.shape[-2:]))


def following(u: mx.array) -> Transform:
    return Transform(u, u.swapaxes(-1, -2))


def off_orthonormal(u: mx.array) -> float:
    """The largest entry of |U^T U - I|, in float64."""
    x = np.array(u, np.float64)
    return float(np.abs(x.swapaxes(-1, -2) @ x - np.eye(x.shape[-1])).max())
