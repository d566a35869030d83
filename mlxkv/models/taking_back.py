"""Take tokens back from all caches of a model, or from none."""

from __future__ import annotations

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.models.hooks.probe import leaves


def cut_back(caches: list, held: int, left: int) -> bool:
    """Cut caches that hold `held` tokens back to their first `left`. False, and nothing has changed, where one of
    them cannot be cut there: a state, a sliding window that has moved on, a prompt whose tokens were chosen."""
    each = [cache for _, cache in leaves(caches)]
    if left < 1 or not all(_keeps(cache, held, left) for cache in each):
        return False
    for cache in each:
        cache.trim(held - left)
    return True


def _keeps(cache, held: int, left: int) -> bool:
    if left == held:
        return True
    if isinstance(cache, CompressedKVCache):
        return cache.keeps(left)
    start = getattr(cache, "start_position", 0)
    return cache.is_trimmable() and held - left <= cache.offset - start
