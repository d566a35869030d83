"""Multiply matrices by NumPy in a block, on CPUs where MLX is slow at it.

MLX's package for CPUs under Linux comes with the reference BLAS. NumPy's takes a 17th of its time (512 x 576 x 1536,
float32), and as much less for softmax. Results differ by rounding; gradients pass through.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
import numpy as np

from mlxkv.metal.launch import device_type

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@contextmanager
def numpy_products(lazy: int = 0) -> Iterator[None]:
    """Compute matrix products and attention of this thread by NumPy, at once; do nothing on GPUs and Macs.

    Gradients are those of activations: a matrix [I, O] on the right is a constant. lazy: products with that many
    outputs are MLX's, which computes none that nobody reads (logits).
    """
    if device_type() != "cpu" or sys.platform != "linux":
        yield
        return
    array, thread = mx.array, threading.get_ident()
    before = array.__matmul__, mx.matmul, mx.addmm, mx.quantized_matmul, mx.softmax
    product, _, add, quantized, softmax = before
    attention = mx.fast.scaled_dot_product_attention

    def ours(*arrays: mx.array, outputs: int = -1) -> bool:
        here = threading.get_ident() == thread and outputs != lazy
        return here and all(isinstance(x, array) and x.dtype in FLOATS for x in arrays)

    def matmul(a, b, **kw):
        if not ours(a, b, outputs=b.shape[-1]) or a.ndim < 2 or b.ndim not in (2, a.ndim):
            return product(a, b, **kw)
        dtype = a.dtype if a.dtype == b.dtype else mx.float32
        made = _linear(a, _numpy(b)) if b.ndim == 2 else _batched(a, b)
        return made.astype(dtype)

    def addmm(c, a, b, **kw):
        return add(c, a, b, **kw) if kw else c + matmul(a, b)

    def quantized_matmul(x, w, /, scales, biases=None, transpose=True, *sizes, **kw):
        if not ours(x, outputs=w.shape[0]) or w.ndim != 2 or x.ndim < 2 or not transpose:
            return quantized(x, w, scales, biases, transpose, *sizes, **kw)
        decoded = mx.dequantize(w, scales, biases, *sizes, **kw)
        return _linear(x, _numpy(decoded).T).astype(x.dtype)

    def fast(q, k, v, *, scale, mask=None, sinks=None, **kw):
        if sinks is not None or not ours(q, k, v):
            return attention(q, k, v, scale=scale, mask=mask, sinks=sinks, **kw)
        return _attention(q, k, v, scale, mask).astype(q.dtype)

    def softmax_of_scores(x, axis=None, **kw):
        if x.ndim != 4 or axis != -1 or not ours(x):
            return softmax(x, axis, **kw)
        return mx.array(_softmax(np.array(_numpy(x)))).astype(x.dtype)

    def put(*functions: Callable) -> None:
        array.__matmul__, mx.matmul, mx.addmm, mx.quantized_matmul, mx.softmax = functions[:5]
        mx.fast.scaled_dot_product_attention = functions[5]

    put(matmul, matmul, addmm, quantized_matmul, softmax_of_scores, fast)
    try:
        yield
    finally:
        put(*before, attention)


def _numpy(x: mx.array) -> np.ndarray:
    """Return x as float32, without a copy if it is."""
    return np.asarray(x.astype(mx.float32))


def _differentiable(
    run: Callable[..., np.ndarray], back: Callable[..., tuple[np.ndarray, ...]], *inputs: mx.array
) -> mx.array:
    """Return run(*inputs) of NumPy arrays; `back` makes gradients of inputs from that of the output."""

    @mx.custom_function
    def function(*xs):
        return mx.array(run(*map(_numpy, xs)))

    @function.vjp
    def vjp(_, cotangent, __):
        made = back(_numpy(cotangent), *map(_numpy, inputs))
        out = [mx.array(g).astype(x.dtype) for g, x in zip(made, inputs, strict=True)]
        return out if len(out) > 1 else out[0]

    return cast(mx.array, function(*inputs))


def _linear(x: mx.array, w: np.ndarray) -> mx.array:
    """Return x @ w of rows x [..., I] and w [I, O]."""
    rows = x.reshape(-1, x.shape[-1])  # in one product
    out = _differentiable(lambda x: x @ w, lambda g, _: (g @ w.T,), rows)
    return out.reshape(*x.shape[:-1], -1)


def _batched(a: mx.array, b: mx.array) -> mx.array:
    """Return a @ b of arrays with as many axes, of which the first ones may be broadcast."""

    def back(g, a, b):
        return _fold(g @ b.swapaxes(-1, -2), a.shape), _fold(a.swapaxes(-1, -2) @ g, b.shape)

    return _differentiable(np.matmul, back, a, b)


def _fold(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum x over the axes that were broadcast from `shape`."""
    axes = tuple(i for i, n in enumerate(shape) if n != x.shape[i])
    return x.sum(axes, keepdims=True) if axes else x


def _attention(q: mx.array, k: mx.array, v: mx.array, scale: float, mask) -> mx.array:
    """Return softmax(scale q k^T + mask) v of queries [B, H, L, D], keys and values [B, G, T, D]; masks as in
    `mx.fast`'s."""
    grouped, total = (*k.shape[:2], -1), k.shape[2]
    p = np.zeros(0, np.float32)

    def run(q, k, v):
        nonlocal p
        s = q.reshape(*grouped, q.shape[3]) @ k.swapaxes(-1, -2)
        s = s.reshape(*q.shape[:3], total)
        s *= scale
        if isinstance(mask, str):
            hidden = ~np.tri(q.shape[2], total, total - q.shape[2], bool)
            np.copyto(s, -np.inf, where=hidden)
        elif mask is not None and mask.dtype == mx.bool_:
            np.copyto(s, -np.inf, where=~np.asarray(mask))
        elif mask is not None:
            s += _numpy(mask)
        p = _softmax(s).reshape(*grouped, total)
        return (p @ v).reshape(*q.shape[:3], v.shape[3])

    def back(g, q, k, v):
        shape, g = q.shape, g.reshape(*grouped, v.shape[3])
        dp = g @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
        dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q.reshape(*grouped, shape[3])
        return dq.reshape(shape), dk, p.swapaxes(-1, -2) @ g

    return _differentiable(run, back, q, k, v)


def _softmax(s: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis of s, which it overwrites."""
    s -= s.max(-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(-1, keepdims=True)
    return s
