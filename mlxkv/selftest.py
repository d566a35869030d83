"""Kernels prove themselves on this machine before they are used, which also warms them up."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from mlxkv.config import CacheConfig
from mlxkv.metal.launch import Factory

BOUND = 0.01  # rms against plain ops; 16-bit outputs and TF32 products stay below half of it
HEADS, KV_HEADS = 8, 2


@cache
def fault(config: CacheConfig, dims: int, dtype: mx.Dtype, make: Factory) -> str | None:
    """What is wrong with the kernels of this format for heads of `dims`, or None.

    Seals a few pages both ways, attends to them and compares; whatever the kernels raise is a
    reason, never an error.
    """
    from mlxkv.attention import _whole, attend
    from mlxkv.cache import View
    from mlxkv.sealed import Codes, Records

    with mx.stream(mx.default_device()):
        key = mx.random.key(0)
        keys, values, queries, live = mx.random.normal(
            (4, 1, HEADS, 2 * config.page, dims), key=key
        )
        pair = tuple(x[:, :KV_HEADS].astype(dtype) for x in (keys, values))
        window = tuple(
            x.astype(dtype) for x in (live[:, :KV_HEADS, :5], live[:, KV_HEADS:][:, :KV_HEADS, :5])
        )
        q = queries[:, :, :1].astype(dtype)
        stores = (Codes(config, (dims, dims)), Records(config, (dims, dims), make))
        try:
            outs = []
            for store in stores:
                store.append(pair, 2)
                view = View(window, None, store.read(0, 2))
                outs.append((attend(q, view, dims**-0.5), *_whole(view, dtype)))
            mx.eval(outs)
        except Exception as error:  # a compiler or a driver may raise anything at all
            return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    for name, ours, plain in zip(("attend", "keys", "values"), outs[1], outs[0], strict=True):
        ours, plain = ours.astype(mx.float32), plain.astype(mx.float32)
        error = mx.sqrt(mx.mean((ours - plain) ** 2) / mx.mean(plain**2)).item()
        if not error <= BOUND:
            return f"{name} is off by {error:.2g}"
    return None
