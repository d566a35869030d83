"""Small caches whose bases follow the text, and the tokens that they are fed."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
from methods import config_named

from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig
from mlxkv.spec import oja as spec

HEADS, KV_HEADS, DIMS, RANK = 4, 2, 32, 24
SCALE = DIMS**-0.5


def config(name: str = "oja-r24", page: int = 16, sink: int = 4, recent: int = 16) -> CacheConfig:
    return replace(config_named(name), page=page, sink=sink, recent=recent)


def cache(name: str = "oja-r24", **windows) -> CompressedKVCache:
    made = config(name, **windows)
    layer_maps = sample(KV_HEADS, (DIMS, DIMS), made.fitted) if made.calibrated else None
    return (AdaptiveKVCache if made.needs_queries else CompressedKVCache)(made, layer_maps)


def data(
    tokens: int, seed: int = 0, heads: int = KV_HEADS, batch: int = 1, dims: int = DIMS
) -> mx.array:
    rng = np.random.default_rng(seed)
    size = np.exp(-0.1 * rng.permutation(dims))
    return mx.array((rng.standard_normal((batch, heads, tokens, dims)) * size).astype(np.float32))


def feed(
    one: AdaptiveKVCache,
    tokens: int,
    seed: int = 0,
    chunk: int = 64,
    batch: int = 1,
    dtype: mx.Dtype = mx.float32,
    dims: int = DIMS,
):
    """Put queries, keys and values of `tokens` tokens through a cache; the last output of attention."""
    q, k, v = (
        data(tokens, seed + i, heads, batch, dims).astype(dtype)
        for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    out = None
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        view, _ = one.update_and_fetch(k[:, :, part], v[:, :, part])
        out = attend(q[:, :, part], view, SCALE, "causal")
        mx.eval(out, one.state)
    return out


def close(x: mx.array, y, bound: float = 2e-5):
    x, y = (np.array(z, np.float64) for z in (x, y))
    return np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2)) < bound


def start(seed: int = 3) -> mx.array:
    return mx.array(
        spec.orthonormal(
            np.random.default_rng(seed).standard_normal((1, KV_HEADS, DIMS, RANK))
        ).astype(np.float32)
    )
