"""Compute exact attention by plain products in float32, one kv head at a time, and KL divergence."""

from __future__ import annotations

import mlx.core as mx

LOWEST = mx.finfo(mx.float32).min  # not -inf, so that differences of masked scores are numbers


def masked_scores(q, k, scale: float, mask=None, sinks=None, softcap=None) -> mx.array:
    """Return logits [B, N, L, T] float32 of q [B, N, L, D] and k [B, 1, T, D].

    mask, softcap: as in `attend`, for these heads. sinks: sink logits [N], which add a column.
    """
    q, k = q.astype(mx.float32), k.astype(mx.float32)
    scores = (q * scale) @ k.swapaxes(-1, -2)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    new, total = scores.shape[2:]
    if isinstance(mask, str):
        mask = mx.arange(total - new, total)[:, None] >= mx.arange(total)[None]
    if mask is not None and mask.dtype == mx.bool_:
        scores = mx.where(mask, scores, LOWEST)
    elif mask is not None:
        scores = mx.maximum(scores + mask.astype(mx.float32), LOWEST)
    if sinks is None:
        return scores
    column = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], (*scores.shape[:3], 1))
    return mx.concatenate([scores, column], axis=-1)


def compare(
    q, exact, keys, scale: float, mask=None, sinks=None, softcap=None
) -> tuple[mx.array, mx.array]:
    """Return exact attention, [B, H, L, Dv] float32, and how far other keys move its distribution:
    the divergence of each query, [B, H, L] in nats.

    q: [B, H, L, D]. exact: keys and values, [B, G, T, D]. keys: the other keys, [B, G, T, D].
    mask, sinks, softcap: as in `attend`.
    """
    heads, kv_heads, total = q.shape[1], keys.shape[1], keys.shape[2]
    ratio = heads // kv_heads
    outs, apart = [], []
    for g in range(kv_heads):  # so that only the scores of one kv head are in memory
        mine = slice(g * ratio, (g + 1) * ratio)
        per_head = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] == heads > 1
        rest = (
            scale,
            mask[:, mine] if per_head else mask,
            None if sinks is None else sinks[mine],
            softcap,
        )
        scores = masked_scores(q[:, mine], exact[0][:, g : g + 1], *rest)
        p = mx.softmax(scores, axis=-1, precise=True)[..., :total]
        outs.append(p @ exact[1][:, g : g + 1].astype(mx.float32))
        others = masked_scores(q[:, mine], keys[:, g : g + 1], *rest)
        apart.append(divergence(scores, others))
        mx.eval(outs[-1], apart[-1])
    return mx.concatenate(outs, axis=1), mx.concatenate(apart, axis=1)


def divergence(scores: mx.array, others: mx.array) -> mx.array:
    """Return KL(softmax(scores) || softmax(others)) over the last axis, in nats: [..., T] -> [...].

    Sums q - p - p log(q / p): no term is negative, so a small divergence is not a difference of
    large sums.
    """
    log_p = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    log_q = others - mx.logsumexp(others, axis=-1, keepdims=True)
    p, q, gap = mx.exp(log_p), mx.exp(log_q), log_q - log_p
    near = p * (mx.expm1(mx.minimum(gap, 1)) - gap)
    terms = mx.where(gap < 1, near, q - p - p * gap)
    # Of tokens that have no chance at all (logits of minus infinity) the gap is no number.
    return mx.where(p > 0, terms, q).sum(axis=-1)
