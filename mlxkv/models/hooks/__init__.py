"""Observers and replacements of parts of an mlx-lm model: its caches, its attention function, its weights.
Nothing here decides what a command does, and nothing else changes a model."""

from mlx_lm.models import cache as _cache

from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import IndexedLatentKVCache, LatentKVCache

# For good: mlx-lm's load_prompt_cache looks classes up in its globals, also before any model is attached.
for _class in (CompressedKVCache, AdaptiveKVCache, LatentKVCache, IndexedLatentKVCache):
    setattr(_cache, _class.__name__, _class)
