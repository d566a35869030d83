"""Bytes that one decoded token reads: weights and caches."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.models.catalog.shapes import text_config
from mlxkv.models.hooks.probe import leaves

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")


def cache_bytes(caches: list) -> int:
    """Bytes that attention reads for one token: stored tokens, without spare room in buffers."""
    return sum(_stored(cache) for _, cache in leaves(caches))


def _stored(cache) -> int:
    if isinstance(cache, CompressedKVCache):
        unread = ("header", "last.keys", "last.values")
        return sum(x.nbytes for name, x in tree_flatten(cache.state) if name not in unread)
    keys = getattr(cache, "keys", None)
    if keys is None or not hasattr(cache, "offset"):
        return cache.nbytes
    room = (keys if isinstance(keys, mx.array) else keys[0]).shape[2]
    return cache.nbytes * min(cache.offset, room) // room


def weight_bytes(model: nn.Module, config: dict) -> int:
    """Bytes of the weights that one token reads.

    Embedding tables count only where they are also the head (tied). Of routed experts, the share that a
    token chooses counts.
    """
    weights = dict(tree_flatten(model.parameters()))
    untied = any("lm_head." in name for name in weights)
    looked_up = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        and (untied or "per_layer" in name)
    ]
    values = text_config(config)
    experts = next((values[k] for k in EXPERTS if values.get(k)), 0)
    chosen = next((values[k] for k in CHOSEN if values.get(k)), experts)
    total = 0.0
    for name, x in weights.items():
        if any(name.startswith(f"{table}.") for table in looked_up):
            continue
        routed = ("experts" in name or "switch" in name) and "shared" not in name
        if routed and experts and x.shape[:1] == (experts,):
            total += x.nbytes * chosen / experts
        else:
            total += x.nbytes
    return int(total)
