"""What the kernels are timed on: shapes, filled caches, and what attention has to give."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlx.core as mx

from mlxkv.cache import CompressedKVCache, View
from mlxkv.calibrated import Rotations, sample
from mlxkv.config import CacheConfig
from mlxkv.errors import UserError

CHUNK = 8192  # tokens that a cache takes at once
# rms(ours - reference) / rms(reference) that is still right: the result is rounded to the type.
BOUNDS = {mx.float32: 2e-3, mx.float16: 5e-3, mx.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """`B1.H32.G8.D128`: batch, query heads, kv heads, head dim."""

    batch: int
    heads: int
    kv_heads: int
    dims: int

    def __str__(self) -> str:
        return f"B{self.batch}.H{self.heads}.G{self.kv_heads}.D{self.dims}"

    def values(self, tokens: int) -> int:
        """Numbers in keys and values."""
        return 2 * self.batch * self.kv_heads * tokens * self.dims

    def pair(self, tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Random keys and values, [B, G, T, D]."""
        shape = (self.batch, self.kv_heads, tokens, self.dims)
        return mx.random.normal(shape, dtype), mx.random.normal(shape, dtype)

    def queries(self, dtype: mx.Dtype) -> mx.array:
        return mx.random.normal((self.batch, self.heads, 1, self.dims), dtype)


def parse_shape(text: str) -> Shape:
    match = re.fullmatch(r"B(\d+)\.H(\d+)\.G(\d+)\.D(\d+)", text.strip(), re.IGNORECASE)
    numbers = [int(n) for n in match.groups()] if match else [0]
    if not all(numbers):
        raise UserError(
            f"[--shapes] not a shape; got {text!r}; choose batch, query heads, kv heads and head "
            "dim such as B1.H32.G8.D128"
        )
    shape = Shape(*numbers)
    if shape.heads % shape.kv_heads:
        raise UserError(
            f"[--shapes] query heads must be a multiple of kv heads; got {text}; choose H a "
            "multiple of G"
        )
    return shape


def rotations(config: CacheConfig, shape: Shape) -> Rotations | None:
    """Random ones per kv head, where the configuration is calibrated."""
    dims = (shape.dims, shape.dims)
    return sample(shape.kv_heads, dims, config.fitted) if config.calibrated else None


def filled(config: CacheConfig, shape: Shape, tokens: int, dtype: mx.Dtype) -> View:
    """What attention reads of a cache that took `tokens` random tokens, through the product's own
    code."""
    cache = CompressedKVCache(config, rotations(config, shape))
    for start in range(0, tokens, CHUNK):
        pair = shape.pair(min(CHUNK, tokens - start), dtype)
        view = cache.update_and_fetch(*pair)[0]
        mx.eval(view.sealed, view.live)
        del view  # a hold on these arrays would have them copied by the next update
    view = cache.keys_and_values()[0]
    mx.eval(view.live, view.sink)
    return view


def stored_bytes(config: CacheConfig, shape: Shape, view: View) -> int:
    """Bytes that attention has to read once: pages and windows."""
    pages = shape.values(view.pages.tokens) * config.bits_per_value(shape.dims, shape.dims) / 8
    windows = shape.values(view.tokens - view.pages.tokens) * view.dtype.size
    return int(pages + windows)


def reference(queries: mx.array, view: View, scale: float) -> mx.array:
    """Attention over the decoded pages in float32, one query head at a time: [B, H, 1, Dv].

    Sums of products, no matrix products: those run in TF32 on some GPUs.
    """
    sides = []
    for side in (0, 1):
        parts = [view.pages.decode(side, mx.float32), view.live[side].astype(mx.float32)]
        if view.sink is not None:
            parts.insert(0, view.sink[side].astype(mx.float32))
        sides.append(mx.concatenate(parts, axis=2))
    batch, heads = queries.shape[:2]
    group = heads // sides[0].shape[1]
    rows = []
    for b in range(batch):
        for h in range(heads):
            keys, values = (x[b, h // group] for x in sides)
            scores = (keys * queries[b, h].astype(mx.float32)).sum(-1) * scale
            p = mx.softmax(scores, axis=-1, precise=True)
            rows.append((values * p[:, None]).sum(0))
            mx.eval(rows[-1])
    return mx.stack(rows).reshape(batch, heads, 1, -1)


def relative_rms(ours: mx.array, expected: mx.array) -> float:
    difference = ours.astype(mx.float32) - expected
    return mx.sqrt(mx.mean(difference**2) / mx.mean(expected**2)).item()
