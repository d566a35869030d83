"""Take tokens back from all caches of a model, or from none."""

from __future__ import annotations

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.models.hooks.probe import leaves


def trim_caches(caches: list, count: int, keep: int) -> bool:
    """Cut caches that hold `count` tokens back to their first `keep`. False, and nothing has changed, where one of
    them cannot be cut there: a state, a sliding window that has moved on, a prompt whose tokens were chosen."""
    if keep == count:
        return keep > 0
    members = [cache for _, cache in leaves(caches)]
    if keep < 1 or not all(_can_keep(cache, count, keep) for cache in members):
        return False
    for cache in members:
        cache.trim(count - keep)
    return True


def _can_keep(cache, count: int, keep: int) -> bool:
    if isinstance(cache, CompressedKVCache):
        return cache.windows.can_keep(keep)
    start = getattr(cache, "start_position", 0)
    return cache.is_trimmable() and count - keep <= cache.offset - start
