"""How much the last queries of a prompt look at each token: who teaches a basis (OjaKV, section 5.2),
and who stays (SnapKV). Spec: `reference_oja`."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from cuda_track.attention import causal, masked, scores
from cuda_track.cache import View

POOL = 7  # tokens, as in the spec
BLOCK = 8  # queries at a time


def importance(
    queries: torch.Tensor, view: View, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, G, T] float32: the softmax scores of queries [B, H, w, D], which are those of the last tokens,
    summed over them and over the heads of a kv head. mask: of these queries; None: causal."""
    batch, heads, new, dims = queries.shape
    kv_heads, total = view.live[0].shape[1], view.tokens
    if mask is None:
        mask = causal(new, total, queries.device)
    q = (queries.float() * scale).reshape(batch, kv_heads, -1, new, dims)
    out = 0.0
    for start in range(0, new, BLOCK):  # the scores of all at once would be large
        part = slice(start, min(start + BLOCK, new))
        s = scores(q[..., part, :].flatten(2, 3), view).reshape(batch, heads, -1, total)
        rows = mask[..., part, :] if mask.shape[-2] > 1 else mask
        p = masked(s, rows).softmax(-1)
        out = out + p.reshape(batch, kv_heads, -1, total).sum(2)
    return out


def salient(importance: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count] positions, ascending, of the tokens that all heads together look at most: importance
    [B, G, T]."""
    return _largest(importance.sum(1), count)


def taken(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x: [B, G, T, D], at: [B, N] -> [B, G, N, D]."""
    return x.take_along_dim(at[:, None, :, None], 2)


def votes(importance: torch.Tensor, pool: int = POOL) -> torch.Tensor:
    """[B, G, T]: the largest importance among `pool` neighbours."""
    near = pool // 2
    return pad(importance, (near, near), value=-torch.inf).unfold(-1, pool, 1).amax(-1)


def kept(votes: torch.Tensor, count: int) -> torch.Tensor:
    """[B, G, count] positions, ascending, of the largest votes [B, G, T]."""
    return _largest(votes, count)


def kept_pages(votes: torch.Tensor, page: int, count: int) -> torch.Tensor:
    """[B, G, count] pages, ascending, alike for all kv heads: by the votes of all their tokens."""
    batch, heads, total = votes.shape
    by_page = votes.reshape(batch, heads, total // page, page).sum((1, 3))
    return _largest(by_page, count)[:, None].expand(batch, heads, count)


def _largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Positions, ascending, of the `count` largest; of equal ones the earlier."""
    return x.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values
