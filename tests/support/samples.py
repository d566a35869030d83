"""Random inputs, and attention in float64 that results are measured against."""

import mlx.core as mx
import numpy as np

from mlxkv.spec import affine as ref


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def data(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 values; channel 3 is six times as large, as in real keys."""
    x = normal(*shape, seed=seed)
    x[..., 3] *= 6
    return x


def rms(x: mx.array, spec: mx.array) -> float:
    """Root mean square error of x, relative to spec."""
    x, spec = (np.array(y.astype(mx.float32), np.float64) for y in (x, spec))
    return np.sqrt(np.mean((x - spec) ** 2) / np.mean(spec**2))


def off(y, x) -> float:
    """Mean squared error of y, as a share of the mean square of x."""
    y, x = np.array(y, np.float64), np.array(x, np.float64)
    return ((y - x) ** 2).sum() / (x**2).sum()


def softmax(q, keys, values, scale, sinks=None, softcap=None) -> mx.array:
    """Causal attention by the spec. sinks: attention sink logits [H]."""
    q, keys, values = (np.array(y.astype(mx.float32), np.float64) for y in (q, keys, values))
    mask = ref.causal_mask(q.shape[2], keys.shape[2])
    sinks = None if sinks is None else np.array(sinks, np.float64)
    return mx.array(ref.attention(q, keys, values, scale, mask, sinks, softcap).astype(np.float32))
