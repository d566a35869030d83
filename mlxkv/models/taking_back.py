"""Take tokens back from the caches of a model, so that reading on is as good as reading afresh."""

from __future__ import annotations

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.models.hooks.probe import leaves


def cut_back(caches: list, held: int, left: int) -> int:
    """Cut caches that hold `held` tokens back to their first `left`, or to fewer, which are to be read again.
    Returns how many they keep; 0: they cannot be cut and have not changed.

    A compressed cache has no exact tokens left but the last ones: to keep `recent` exact tokens it goes
    back to the end of a page more than that before `left`, so at most `recent` and a page of tokens are
    read again. Other caches of the model go back as far.
    """
    each = [cache for _, cache in leaves(caches)]
    compressed = [cache for cache in each if isinstance(cache, CompressedKVCache)]
    limit = left
    if not all(cache.keeps(left) for cache in compressed):
        limit -= max(cache.config.recent for cache in compressed) + 1
    kept = _agreed(each, held, limit)
    if 0 < kept < held:
        for cache in each:
            if isinstance(cache, CompressedKVCache):
                cache.cut(kept)
            else:
                cache.trim(held - kept)
    return kept


def _agreed(each: list, held: int, limit: int) -> int:
    """The longest start, of at most `limit` tokens, that all caches can keep."""
    before = None
    while limit != before and limit > 0:
        before, limit = limit, min((_restart(c, held, limit) for c in each), default=0)
    return max(limit, 0)


def _restart(cache, held: int, limit: int) -> int:
    if isinstance(cache, CompressedKVCache):
        return cache.restart(limit)
    if limit == held:
        return limit
    here = cache.is_trimmable() and held - limit <= cache.offset - getattr(
        cache, "start_position", 0
    )
    return limit if here else 0
