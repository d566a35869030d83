"""Weigh stored keys by the attention that far queries give them. Spec: `mlxkv.spec.balanced`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxkv.cache.attention import _softmax
from mlxkv.models.hooks.taps import AttentionCall

AWAY = 124  # tokens so near to a query are exact
EVERY = 8  # one query in so many is asked: scores would cost as much as attention does


def received(call: AttentionCall, sink: int) -> np.ndarray | None:
    """Return the attention [G, T] that each key gets in one call from far queries, summed over its query heads; None
    where no query is far from a key behind the first `sink`."""
    keys, new = call.exact[0], call.queries.shape[2]
    total = keys.shape[2]
    at = np.arange(total - new, total)
    rows = np.flatnonzero((at % EVERY == 0) & (at - AWAY > sink))
    if not len(rows):
        return None
    at, place = mx.array(at[rows])[:, None], mx.arange(total)
    q = call.queries[:, :, mx.array(rows)].astype(mx.float32) * call.scale
    batch, heads, count, dims = q.shape
    q = q.reshape(batch, keys.shape[1], -1, dims)
    scores = q @ keys.astype(mx.float32).swapaxes(-1, -2)
    mask = place <= at
    if isinstance(call.mask, mx.array):
        mask = call.mask[..., mx.array(rows), :] if call.mask.shape[-2] > 1 else call.mask
    p = _softmax(scores.reshape(batch, heads, count, total), mask, call.sinks, call.softcap)
    far = mx.where(place < at - AWAY, p, 0)
    return np.array(far.reshape(batch, keys.shape[1], -1, total).sum((0, 2)), np.float64)
