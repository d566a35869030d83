"""Products by NumPy where MLX runs on a CPU of Linux: its wheel brings a reference BLAS, a thirtieth as fast as the
OpenBLAS of NumPy's. A calibration is made of large products, and the first use of a preset waits for it.

Letters: `B` batch, `G` kv heads, `H` query heads, `L` new tokens, `T` tokens, `D` and `Dv` head dims.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv.cache.attention import attend
from mlxkv.cache.view import View
from mlxkv.metal.launch import backend
from mlxkv.models.hooks.taps import hook, restore_classes


def is_slow() -> bool:
    """Whether MLX's own products are."""
    return platform.system() == "Linux" and backend() == "cpu"


def matmul(x: mx.array, y: mx.array) -> mx.array:
    """Return x @ y of float32."""
    return mx.array(np.array(x, copy=False) @ np.array(y, copy=False)) if is_slow() else x @ y


@contextmanager
def linear_maps(model: nn.Module) -> Iterator[None]:
    """Inside, the float32 linear maps of the layers of `model` are products of NumPy, if MLX's are slow."""
    layers = getattr(model, "layers", ()) if is_slow() else ()
    modules = {id(m): m for layer in layers for m in layer.modules()}
    hooked = []
    try:
        for module in modules.values():
            if type(module) is nn.Linear and module.weight.dtype == mx.float32:
                hooked.append(hook(module, partial(_linear, module)))
        yield
    finally:
        restore_classes(hooked)


def _linear(module: nn.Linear, call: Callable, x: mx.array) -> mx.array:
    if x.dtype != mx.float32:
        return call(x)
    out = matmul(x.reshape(-1, x.shape[-1]), module.weight.T).reshape(*x.shape[:-1], -1)
    return out + module.bias if "bias" in module else out


def attended(
    queries: mx.array,
    view: View,
    scale: float,
    mask: mx.array | str | None = None,
    sink_logits: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """As `attend`, over a view of plain keys and values."""
    if not is_slow() or (mask is not None and not isinstance(mask, str)) or queries.shape[0] > 1:
        return attend(queries, view, scale, mask, sink_logits, softcap)
    keys, values = (np.array(x.astype(mx.float32), copy=False)[0] for x in view.live)
    new, dims, total = *queries.shape[2:], keys.shape[1]
    q = np.array(queries.astype(mx.float32) * scale, copy=False).reshape(len(keys), -1, dims)
    later = np.arange(total) > np.arange(total - new, total)[:, None]
    later = np.where(later & (mask == "causal"), np.float32(-np.inf), np.float32(0))  # [L, T]
    out = []
    for g in range(len(keys)):
        scores = (q[g] @ keys[g].T).reshape(-1, new, total)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores += later
        top = scores.max(-1, keepdims=True)
        extra = 0
        if sink_logits is not None:
            own = np.array(sink_logits.astype(mx.float32)).reshape(len(keys), -1)[g][:, None, None]
            top = np.maximum(top, own)
            extra = np.exp(own - top)
        scores -= top
        np.exp(scores, out=scores)
        whole = scores.sum(-1, keepdims=True) + extra
        out.append(
            (scores.reshape(-1, total) @ values[g]).reshape(-1, new, values.shape[-1]) / whole
        )
    return mx.array(np.concatenate(out)[None]).astype(queries.dtype)
