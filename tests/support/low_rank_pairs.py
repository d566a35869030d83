"""The same low-rank cache in torch and in MLX, and the tokens that both are fed."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import torch

from cuda_track.cache import adaptive
from cuda_track.cache.attention import attend
from cuda_track.codec import maps
from mlxkv.cache import adaptive as mlx_adaptive
from mlxkv.cache.attention import attend as mlx_attend
from mlxkv.codec import maps as mlx_calibrated
from mlxkv.formats.names import parse_kv
from mlxkv.formats.records import NAMES

HEADS, KV_HEADS, DIMS = 4, 2, 32
SCALE = DIMS**-0.5


def data(tokens: int, seed: int, heads: int = KV_HEADS, batch: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = np.exp(-0.1 * rng.permutation(DIMS))
    return (rng.standard_normal((batch, heads, tokens, DIMS)) * size).astype(np.float32)


def caches(name: str) -> tuple[adaptive.AdaptiveKVCache, mlx_adaptive.AdaptiveKVCache]:
    """The same cache on both sides, its bases random."""
    config = parse_kv(name)
    page = config.page if "kivi" in name else 16
    config, mine, theirs = replace(config, sink=4, recent=16, page=page), None, None
    if config.calibrated:
        theirs = mlx_calibrated.sample(KV_HEADS, (DIMS, DIMS), config.fitted)
        sides = (getattr(theirs, side) for side in NAMES)
        mine = maps.LayerMaps(
            *(maps.pair(np.array(x.down), np.array(x.up)) for x in sides), "sample", "0"
        )
    return adaptive.AdaptiveKVCache(config, mine), mlx_adaptive.AdaptiveKVCache(config, theirs)


def feed(cache, tokens: int, seed: int = 0, chunk: int = 64, batch: int = 1) -> np.ndarray:
    """`tokens` tokens through a cache of either side; what attention gave out last."""
    q, k, v = (data(tokens, seed + i, h, batch) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        if isinstance(cache, adaptive.AdaptiveKVCache):
            view = cache.update_and_fetch(*(torch.from_numpy(x[:, :, part]) for x in (k, v)))
            out = attend(torch.from_numpy(q[:, :, part]), view, SCALE, "causal").numpy()
        else:
            view, _ = cache.update_and_fetch(*(mx.array(x[:, :, part]) for x in (k, v)))
            out = np.array(mlx_attend(mx.array(q[:, :, part]), view, SCALE, "causal"))
    return out
