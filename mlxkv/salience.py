"""How much the last queries of a prompt look at each token: who teaches a basis (OjaKV, section 5.2),
and who stays (SnapKV). Spec: `reference_oja`."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.attention import masked, scorer
from mlxkv.cache import View

POOL = 7  # tokens, as in the spec
BLOCK = 8  # queries at a time


def importance(
    queries: mx.array, view: View, scale: float, mask: mx.array | None = None
) -> mx.array:
    """[B, G, T] float32: the softmax scores of queries [B, H, w, D], which are those of the last tokens,
    summed over them and over the heads of a kv head. mask: of these queries; None: causal."""
    batch, heads, new, dims = queries.shape
    kv_heads, total = view.live[0].shape[1], view.tokens
    if mask is None:
        mask = mx.arange(total - new, total)[:, None] >= mx.arange(total)[None]
    q = (queries.astype(mx.float32) * scale).reshape(batch, kv_heads, -1, new, dims)
    out, score = 0.0, scorer(view)
    for start in range(0, new, BLOCK):  # the scores of all at once would be large
        part = slice(start, min(start + BLOCK, new))
        s = score(q[..., part, :].flatten(2, 3)).reshape(batch, heads, -1, total)
        rows = mask[..., part, :] if mask.shape[-2] > 1 else mask
        p = mx.softmax(masked(s, rows), axis=-1, precise=True)
        out = out + p.reshape(batch, kv_heads, -1, total).sum(2)
    return out


def salient(importance: mx.array, count: int) -> mx.array:
    """[B, count] positions, ascending, of the tokens that all heads together look at most: importance
    [B, G, T]."""
    return mx.sort(_largest(importance.sum(1), count), axis=-1)


def taken(x: mx.array, at: mx.array) -> mx.array:
    """x: [B, G, T, D], at: [B, N] -> [B, G, N, D]."""
    return mx.take_along_axis(x, at[:, None, :, None], axis=2)


def votes(importance: mx.array, pool: int = POOL) -> mx.array:
    """[B, G, T]: the largest importance among `pool` neighbours."""
    near = pool // 2
    padded = mx.pad(importance, [(0, 0), (0, 0), (near, near)], constant_values=-mx.inf)
    total = importance.shape[-1]
    out = importance
    for shift in range(pool):
        out = mx.maximum(out, padded[..., shift : shift + total])
    return out


def kept(votes: mx.array, count: int) -> mx.array:
    """[B, G, count] positions, ascending, of the largest votes [B, G, T]."""
    return mx.sort(_largest(votes, count), axis=-1)


def kept_pages(votes: mx.array, page: int, count: int) -> mx.array:
    """[B, G, count] pages, ascending, alike for all kv heads: by the votes of all their tokens."""
    batch, heads, total = votes.shape
    by_page = votes.reshape(batch, heads, total // page, page).sum((1, 3))
    chosen = mx.sort(_largest(by_page, count), axis=-1)
    return mx.broadcast_to(chosen[:, None], (batch, heads, count))


def _largest(x: mx.array, count: int) -> mx.array:
    """Positions of the `count` largest; of equal ones the earlier (a sort that keeps their order)."""
    return mx.argsort(-x, axis=-1)[..., :count]
