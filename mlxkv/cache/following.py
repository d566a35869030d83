"""Bases of low rank that follow the text, by Oja's rule. Spec: `spec.oja`.

U: [B, G, D, R] float32, orthonormal columns. A kernel factorises on a GPU; MLX does so only on the
CPU, where it takes tens of milliseconds a layer.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxkv.codec.maps import LayerMaps
from mlxkv.codec.transform import Transform
from mlxkv.formats.config import CacheConfig
from mlxkv.metal import launch
from mlxkv.metal.launch import Factory
from mlxkv.metal.whiten import RIDGE, TINY, orthonormal, whiten, why_not

BATCH = 32  # batches grow to a multiple of it for the kernel: there is one for every length
Pair = tuple[mx.array, mx.array]


def update(
    u: mx.array, x: mx.array, rate: float, raw: bool = False, make: Factory | None = None
) -> mx.array:
    """U after a batch x [B, G, N, D]. Where the batch holds NaN or infinity, U does not change. make:
    builds the kernel of `metal.whiten`, which must run for this size (`why_not`); None: plain ops."""
    if make is not None and not raw:
        return _updated(u, x.astype(mx.float32), rate, make)
    with mx.stream(mx.cpu):
        x = x.astype(mx.float32)
        y = x @ u
        step = (x - y @ u.swapaxes(-1, -2)).swapaxes(-1, -2) @ y
        if not raw:
            moment = y.swapaxes(-1, -2) @ y
            mean = mx.diagonal(moment, axis1=-2, axis2=-1).mean(-1)[..., None, None]
            moment = moment + (RIDGE * mean + TINY) * mx.eye(u.shape[-1])
            # LAPACK fails on NaN: unsound moments are replaced.
            sound = mx.isfinite(moment).all((-1, -2), keepdims=True)
            moment = mx.where(sound, moment, mx.eye(u.shape[-1]))
            step = mx.linalg.solve(moment, step.swapaxes(-1, -2)).swapaxes(-1, -2)
        made = u + rate * step
        sound = mx.isfinite(made).all((-1, -2), keepdims=True)
        return mx.where(sound, orthonormal(mx.where(sound, made, u)), u)


def _updated(u: mx.array, x: mx.array, rate: float, make: Factory) -> mx.array:
    """`update` by the kernel: y^T y + r I = L L^T, and y (y^T y + r I)^-1 = (y L^-T) L^-1."""
    x = mx.pad(x, [(0, 0), (0, 0), (0, -x.shape[-2] % BATCH), (0, 0)])  # zeros teach nothing
    y, count = x @ u, x.shape[-2]
    rest = x - y @ u.swapaxes(-1, -2)
    both = whiten(y, make, RIDGE)
    step = rest.swapaxes(-1, -2) @ (both[..., :count, :] @ both[..., count:, :].swapaxes(-1, -2))
    made = u + rate * step
    sound = mx.isfinite(made).all((-1, -2), keepdims=True)
    return mx.where(sound, whiten(mx.where(sound, made, u), make), u)


def taught(
    now: LayerMaps, config: CacheConfig, batch: Pair, prompt: bool, heads: tuple[int, int]
) -> LayerMaps:
    """`now` after a batch of keys and values [B, G, N, D], of a prompt or decoded. heads: (B, G)."""
    made, todo = {}, []
    for name, x in zip(("keys", "values"), batch, strict=True):
        side = getattr(config, name)
        if not side.follows:
            continue
        rate = side.low.prefill_rate if prompt else side.low.decode_rate
        if rate:
            todo.append((name, whole(getattr(now, name), heads), x, rate, side.low.raw))
    if len(todo) == 2 and _alike(*todo):  # both in one kernel take the time of one
        (keys, *first), (values, *second) = todo
        u, x = (mx.concatenate(pair) for pair in zip(first[:2], second[:2], strict=True))
        made[keys], made[values] = mx.split(_update(u, x, *first[2:]), 2)
    else:
        made |= {name: _update(*rest) for name, *rest in todo}
    return replace(now, **{n: following(u) for n, u in made.items()}) if made else now


def _alike(one: tuple, other: tuple) -> bool:
    return (
        one[1].shape == other[1].shape and one[2].shape == other[2].shape and one[3:] == other[3:]
    )


def _update(u: mx.array, x: mx.array, rate: float, raw: bool) -> mx.array:
    """`update` by kernels where they run."""
    make = launch.factory()
    return update(u, x, rate, raw, None if why_not(*u.shape[-2:], make) else make)


def whole(transform: Transform, heads: tuple[int, int]) -> mx.array:
    """U of a transform for each of (B, G)."""
    down = transform.down
    return mx.broadcast_to(down, (*heads, *down.shape[-2:]))


def following(u: mx.array) -> Transform:
    return Transform(u, u.swapaxes(-1, -2))
