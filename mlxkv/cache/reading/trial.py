"""Tries the kernels that read a share of the pages on this machine, before they are used (`cache.selftest`)."""

from __future__ import annotations

import mlx.core as mx

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
    kv_heads, new = chunks.shape[1], queries.shape[2]
    q = queries.astype(mx.float32).reshape(1, kv_heads, -1, queries.shape[3]) * scale
    start = view.sink[0].shape[2] if view.sink else 0
    sides = []
    for side in (0, 1):
        parts = [view.live[side].astype(mx.float32)]
        parts.insert(0, plain.decode(side, mx.float32))
        if view.sink:
            parts.insert(0, view.sink[side].astype(mx.float32))
        sides.append(mx.concatenate(parts, axis=2))
    keys, values = sides
    total, tail = keys.shape[2], start + plain.tokens
    s = (q @ keys.swapaxes(-1, -2)).reshape(1, kv_heads, -1, new, total)
    seen = mx.arange(total - new, total)[:, None] >= mx.arange(total)[None]
    s = mx.where(seen, s, -mx.inf).reshape(*q.shape[:3], total)
    windows = mx.concatenate([s[..., :start], s[..., tail:]], axis=-1)
    reading = plain.reading
    logs = summary.estimates(plain.codecs[0].query(q), reading.summaries, reading.chunk)
    weight = summary.weights(logs, mx.logsumexp(windows, axis=-1, keepdims=True))
    wanted = count(weight.shape[-1], reading.share)
    chunks = chunks[:, :, :wanted]
    best = mx.sort(weight, axis=-1)[..., weight.shape[-1] - wanted :].sum(-1)
    mass = mx.take_along_axis(weight, chunks, axis=-1).sum(-1)
    if not mx.all(mass >= best * (1 - LESS)).item():
        return "the chunks that are read are not those that promise most"
    at = mx.arange(weight.shape[-1])
    read = (chunks[..., None] == at).any(-2)
    if not mx.all(read.sum(-1) == wanted).item():
        return "a chunk is read twice"
    read = mx.repeat(read, reading.chunk, axis=-1)
    read = mx.pad(read, [(0, 0), (0, 0), (start, total - tail)], constant_values=True)
    if softcap is not None:
        s = softcap * mx.tanh(s / softcap)
    s = mx.where(read[:, :, None], s, -mx.inf)
    if sink_logits is not None:
        column = mx.repeat(sink_logits.astype(mx.float32).reshape(1, kv_heads, -1), new, axis=-1)
        s = mx.concatenate([s, column[..., None]], axis=-1)
    p = mx.softmax(s, axis=-1, precise=True)[..., :total]
    right = (p @ values).reshape(found.shape)
    off = mx.square(found.astype(mx.float32) - right).mean() / mx.square(right).mean()
    off = mx.sqrt(off).item()
    return None if off <= bound else f"attention over a share of the pages is off by {off:.2g}"
