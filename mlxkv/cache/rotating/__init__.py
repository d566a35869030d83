"""Compressed caches of layers that see a sliding window of the text."""

from mlxkv.cache.rotating.single import WindowedKVCache

__all__ = ["WindowedKVCache"]
