"""The same low-rank cache in torch and in MLX, and the tokens that both are fed."""

import low_rank_cache as mlx
import numpy as np
import torch
from low_rank_cache import DIMS, HEADS, KV_HEADS, SCALE
from shorthand import config_named

from cuda_track.cache import adaptive
from cuda_track.cache.attention import attend
from cuda_track.codec import maps
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.codec.maps import sample
from mlxkv.formats.records import NAMES


def data(tokens: int, seed: int, heads: int = KV_HEADS, batch: int = 1) -> np.ndarray:
    return np.array(mlx.data(tokens, seed, heads, batch))


def caches(name: str) -> tuple[adaptive.AdaptiveKVCache, AdaptiveKVCache]:
    """The same cache on both sides, its bases random."""
    config = mlx.config(name, config_named(name).page if "kivi" in name else 16)
    mine = theirs = None
    if config.calibrated:
        theirs = sample(KV_HEADS, (DIMS, DIMS), config.fitted)
        sides = (getattr(theirs, side) for side in NAMES)
        pairs = (maps.pair(np.array(x.down), np.array(x.up)) for x in sides)
        mine = maps.LayerMaps(*pairs, "sample", "0")
    return adaptive.AdaptiveKVCache(config, mine), AdaptiveKVCache(config, theirs)


def feed(cache, tokens: int, seed: int = 0, chunk: int = 64, batch: int = 1) -> np.ndarray:
    """`tokens` tokens through a cache of either side; what attention gave out last."""
    if isinstance(cache, AdaptiveKVCache):
        return np.array(mlx.feed(cache, tokens, seed, chunk, batch))
    heads = HEADS, KV_HEADS, KV_HEADS
    q, k, v = (torch.from_numpy(data(tokens, seed + i, h, batch)) for i, h in enumerate(heads))
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        view = cache.update_and_fetch(k[:, :, part], v[:, :, part])
        out = attend(q[:, :, part], view, SCALE, "causal")
    return out.numpy()
