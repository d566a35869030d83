"""Shapes and filled caches for timing kernels."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.view import Snapshot, View
from mlxkv.codec.maps import LayerMaps, sample
from mlxkv.formats.config import CacheConfig

CHUNK = 8192  # tokens of one update of a cache


@dataclass(frozen=True)
class KernelShape:
    """`B1.H32.G8.D128`: batch, query heads, kv heads, head dim."""

    batch: int
    heads: int
    kv_heads: int
    dims: int

    def __str__(self) -> str:
        return f"B{self.batch}.H{self.heads}.G{self.kv_heads}.D{self.dims}"

    def values(self, tokens: int) -> int:
        """Return the count of numbers in keys and values of `tokens` tokens."""
        return 2 * self.batch * self.kv_heads * tokens * self.dims

    def pair(self, tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Return random keys and values, [B, G, T, D]."""
        shape = (self.batch, self.kv_heads, tokens, self.dims)
        return mx.random.normal(shape, dtype), mx.random.normal(shape, dtype)

    def queries(self, dtype: mx.Dtype) -> mx.array:
        """Return random queries of one token, [B, H, 1, D]."""
        return mx.random.normal((self.batch, self.heads, 1, self.dims), dtype)


def rotations(config: CacheConfig, shape: KernelShape) -> LayerMaps | None:
    """Return random rotations per kv head for a calibrated configuration, else None."""
    dims = (shape.dims, shape.dims)
    return sample(shape.kv_heads, dims, config.fitted) if config.calibrated else None


def filled(config: CacheConfig, shape: KernelShape, tokens: int, dtype: mx.Dtype) -> View:
    """Return the view of a cache with `tokens` random tokens."""
    cache = CompressedKVCache(config, rotations(config, shape))
    for start in range(0, tokens, CHUNK):
        pair = shape.pair(min(CHUNK, tokens - start), dtype)
        view = cache.update_and_fetch(*pair)[0]
        mx.eval(view.quantized, view.recent)
        del view  # while it lives, the next update copies its arrays
    view = cache.keys_and_values()[0]
    mx.eval(view.recent, view.sink)
    return view


def pages_of(view: View) -> Snapshot:
    """Return the pages of a view from `filled`, with more tokens than fit the windows."""
    assert view.pages is not None
    return view.pages


def stored_bytes(config: CacheConfig, shape: KernelShape, view: View) -> int:
    """Return the bytes of pages and windows, which attention reads once."""
    paged = pages_of(view).tokens
    pages = shape.values(paged) * config.bits_per_value(shape.dims, shape.dims) / 8
    windows = shape.values(view.tokens - paged) * view.dtype.size
    return int(pages + windows)
