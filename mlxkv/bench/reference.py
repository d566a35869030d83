"""Attention in float32 over the decoded contents of a cache, and how far a result may be from it."""

from __future__ import annotations

import math

import mlx.core as mx

from mlxkv.cache.attention import chosen_of, stored_query
from mlxkv.cache.reading import summary
from mlxkv.cache.reading.trial import LESS
from mlxkv.cache.view import RecordPages, View
from mlxkv.formats.rules.reading import count

# Largest relative_rms(result, reference) that is right: the result is rounded to its type.
BOUNDS = {mx.float32: 2e-3, mx.float16: 5e-3, mx.bfloat16: 1e-2}


def reference(queries: mx.array, view: View, scale: float, all_read: bool = False) -> mx.array:
    """Attention over the decoded pages in float32, one query head at a time: [B, H, 1, Dv]. all_read: as a prompt
    reads, whatever share of them a decode step does.

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
    seen, rows = None if all_read else _seen(queries, sides[0], view, scale), []
    for b in range(batch):
        for h in range(heads):
            keys, values = (x[b, h // group] for x in sides)
            scores = (keys * queries[b, h].astype(mx.float32)).sum(-1) * scale
            if seen is not None:
                scores = mx.where(seen[b, h // group], scores, -mx.inf)
            p = mx.softmax(scores, axis=-1, precise=True)
            rows.append((values * p[:, None]).sum(0))
            mx.eval(rows[-1])
    return mx.stack(rows).reshape(batch, heads, 1, -1)


def _seen(queries: mx.array, keys: mx.array, view: View, scale: float) -> mx.array | None:
    """Which tokens a step reads, boolean [B, G, T], where it does not read all."""
    reading = view.pages.reading
    if reading is None:
        return None
    q = queries.astype(mx.float32).reshape(*keys.shape[:2], -1, keys.shape[3]) * scale
    chunks, start = view.pages.tokens // reading.chunk, view.sink[0].shape[2] if view.sink else 0
    asked = view.pages.codecs[0].query(q)[:, :, :, None]  # [B, G, N, 1, R]
    mean, deviation = summary.moments(reading.summaries[:, :, :chunks], asked.shape[4])
    logs = (asked * mean[:, :, None] + mx.square(asked * deviation[:, :, None]) / 2).sum(-1)
    tail = start + view.pages.tokens
    windows = mx.concatenate([keys[:, :, :start], keys[:, :, tail:]], axis=2)
    beside = mx.logsumexp((q[:, :, :, None] * windows[:, :, None]).sum(-1), axis=-1, keepdims=True)
    weight = summary.weights(logs + math.log(reading.chunk), beside)
    taken = summary.taken(weight, reading.share)
    picked = _picked(queries, view, scale, count(chunks, reading.share), chunks)
    # Near ties may fall to either side: of chunks that promise as much, those that were read count.
    if picked is not None and mx.all(
        (weight * picked).sum(-1) >= (1 - LESS) * (weight * taken).sum(-1)
    ):
        taken = picked
    read = mx.repeat(taken, reading.chunk, axis=-1)
    more = keys.shape[2] - tail
    return mx.pad(read, [(0, 0), (0, 0), (start, more)], constant_values=True)


def _picked(
    queries: mx.array, view: View, scale: float, wanted: int, chunks: int
) -> mx.array | None:
    """Which chunks the kernels read, boolean [B, G, chunks]; None by plain ops, and where all are read."""
    pages, live = view.pages, view.live[0]
    if not isinstance(pages, RecordPages):
        return None
    q = queries.reshape(*live.shape[:2], -1, queries.shape[3])
    sink = view.sink[0].shape[2] if view.sink else 0
    lengths = ((pages.records, sink, live.shape[2]),) * len(queries)
    found = chosen_of(
        *(pages, stored_query(pages, q.astype(mx.float32)), q.astype(live.dtype)),
        *(view.sink, view.live, lengths, scale, queries.shape[2], None),
    )
    if found is None:
        return None
    read = (found.chunks[..., :wanted, None] == mx.arange(chunks)).sum(-2)
    return read > 0 if mx.all(read.sum(-1) == wanted) and read.max() == 1 else None


def relative_rms(result: mx.array, expected: mx.array) -> float:
    """rms(result - expected) / rms(expected)"""
    difference = result.astype(mx.float32) - expected
    return mx.sqrt(mx.mean(difference**2) / mx.mean(expected**2)).item()
