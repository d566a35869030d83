"""Attention in float32 over the decoded contents of a cache, and how far a result may be from it."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.cache.view import View

# Largest relative_rms(result, reference) that is right: the result is rounded to its type.
BOUNDS = {mx.float32: 2e-3, mx.float16: 5e-3, mx.bfloat16: 1e-2}


def reference(queries: mx.array, view: View, scale: float) -> mx.array:
    """Attention over the decoded pages in float32, one query head at a time: [B, H, 1, Dv].

    Sums of products, not matrix products: some GPUs compute these in TF32.
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


def relative_rms(result: mx.array, expected: mx.array) -> float:
    """rms(result - expected) / rms(expected)"""
    difference = result.astype(mx.float32) - expected
    return mx.sqrt(mx.mean(difference**2) / mx.mean(expected**2)).item()
