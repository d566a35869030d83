"""THE SPEC of moments of keys that count what attention reads, in NumPy float64. Rules as in `affine.py`.

The error e of a key moves the scores of all queries, but an output only by the weight p of its token: its error is
p (q . e) (v - out). A map that is best for the usual key may be poor for the few that are read. So the second moment
and the mean of keys are halves of two, of all keys that caches would compress and of the same keys by weight:

    a_j = sum over query heads and queries t of p_tj, where t - j > away,
    S = (mean of k k^T + sum a k k^T / sum a) / 2

Nearer tokens are exact in caches, as are the first `sink`. Both halves are about the same mean, the half of both means,
which is that of their mixture. Queries at positions 0, every, 2 every, ... are asked. Half of the weight is what was
tried (docs/results/positions.md); all of it would leave out directions that no key of a short text that is read has.

`H` query heads, `G` kv heads, `T` tokens of a window, `D` head dim.
"""

from __future__ import annotations

import numpy as np


def received(
    q: np.ndarray, k: np.ndarray, scale: float, sink: int = 64, away: int = 124, every: int = 8
) -> np.ndarray:
    """Return a [G, T] of one window: causal attention of q [H, T, D] to k [G, T, D] by softmax."""
    heads, tokens, _ = q.shape
    out, group = np.zeros(k.shape[:2]), heads // len(k)
    for t in range(0, tokens, every):
        for head in range(heads):
            scores = k[head // group, : t + 1] @ q[head, t] * scale
            weights = np.exp(scores - scores.max())
            far = weights[: max(0, t - away)] / weights.sum()
            out[head // group, : len(far)] += far
    out[:, :sink] = 0
    return out


def weighted(k: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the second moments [G, D, D] and means [G, D] of keys k [G, T, D] that count a [G, T]."""
    share = a / a.sum(-1, keepdims=True)
    return np.einsum("gt,gtd,gte->gde", share, k, k), np.einsum("gt,gtd->gd", share, k)


def halves(k: np.ndarray, a: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return S [G, D, D] and the mean [G, D] of keys k [G, T, D], of which those of `stored` [T] are compressed."""
    plain = weighted(k, np.broadcast_to(stored, a.shape).astype(np.float64))
    return tuple((x + y) / 2 for x, y in zip(plain, weighted(k, a), strict=True))
