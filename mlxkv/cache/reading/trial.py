"""Tries the kernels that read a share of the pages on this machine, before they are used (`cache.selftest`)."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxkv.cache.attention import _softmax, _whole, masked
from mlxkv.cache.reading import summary
from mlxkv.cache.view import CodePages, View
from mlxkv.formats.rules.reading import count

LESS = 0.01  # of the mass that the best chunks promise, which those of the kernel may miss: products are rounded there


def wrong(
    queries: mx.array,
    view: View,
    chunks: mx.array,
    found: mx.array,
    plain: CodePages,
    scale: float,
    bound: float,
    sink_logits: mx.array | None = None,
    softcap: float | None = None,
) -> str | None:
    """Why a step that reads `chunks` [1, G, K] is wrong, or None.

    queries: [1, H, L, D], of the last L tokens. view: over pages of kernels. found: what attention returned. plain: the
    same pages for plain ops. Two checks, since near ties may fall to either side: the chunks are nearly the best ones,
    and the result is attention over just these.
    """
    kv_heads = chunks.shape[1]
    q = queries.astype(mx.float32).reshape(1, kv_heads, -1, queries.shape[3]) * scale
    start = view.sink[0].shape[2] if view.sink else 0
    keys, values = (x.astype(mx.float32) for x in _whole(replace(view, pages=plain), mx.float32))
    total, tail = keys.shape[2], start + plain.tokens
    s = (q @ keys.swapaxes(-1, -2)).reshape(*queries.shape[:3], total)
    seen = masked(s, "causal").reshape(*q.shape[:3], total)
    windows = mx.concatenate([seen[..., :start], seen[..., tail:]], axis=-1)
    reading = plain.reading
    logs = summary.estimates(plain.codecs[0].query(q), reading.summaries, reading.chunk)
    weight = summary.weights(logs, mx.logsumexp(windows, axis=-1, keepdims=True))
    wanted = count(weight.shape[-1], reading.share)
    chunks = chunks[:, :, :wanted]
    best = mx.sort(weight, axis=-1)[..., weight.shape[-1] - wanted :].sum(-1)
    mass = mx.take_along_axis(weight, chunks, axis=-1).sum(-1)
    at = mx.arange(weight.shape[-1])
    read = (chunks[..., None] == at).any(-2)
    if not mx.all(read.sum(-1) == wanted).item():
        return "a chunk is read twice"
    if not mx.all(mass >= best * (1 - LESS)).item():
        return "the chunks that are read are not those that promise most"
    read = mx.repeat(read, reading.chunk, axis=-1)
    read = mx.pad(read, [(0, 0), (0, 0), (start, total - tail)], constant_values=True)
    read = mx.broadcast_to(read[:, :, None], seen.shape).reshape(s.shape)
    p = _softmax(s, "causal", sink_logits, softcap, read).reshape(seen.shape)
    right = (p @ values).reshape(found.shape)
    off = mx.square(found.astype(mx.float32) - right).mean() / mx.square(right).mean()
    off = mx.sqrt(off).item()
    return None if off <= bound else f"attention over a share of the pages is off by {off:.2g}"
