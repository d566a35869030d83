"""THE SPEC of balanced transforms, in NumPy float64. Rules as in `affine.py`.

The idea is the balanced truncation of linear systems (Moore, "Principal component analysis in linear
systems", IEEE TAC 26, 1981), not a paper on caches: choose coordinates in which a state is as hard to
reach as it is to observe.

Codes with one step for all stored dims err by as much in each of them, and the step grows with what
is stored: noise N = tr(down^T Sigma down), Sigma the second moment of keys (values). A logit (an
output) reads that error with sensitivity S = tr(up M up^T), M the second moment of queries (or W W^T
of the output projection). The expected error is N S times a constant, and over all invertible maps

    N S >= (sum of sigma)^2,  sigma^2 the eigenvalues of Sigma M,

with equality where down^T Sigma down = up M up^T up to a factor (Cauchy-Schwarz). sigma, the Hankel
singular values of such a pair, do not change when keys are multiplied by any matrix and queries by
its inverse transpose, so outlier channels are undone. Orthogonal maps change neither factor: none
does better than the identity here. An orthogonal mixing after the map is free to choose: HP as in
`oscar.py`, which spreads a token evenly over the dims of a group.

Centred keys: with the mean m of a kv head's keys after RoPE taken from every key,

    softmax over t of q . (k_t - m) = softmax over t of (q . k_t - q . m) = softmax over t of q . k_t,

exactly, since all scores of a query lose the same number. That holds as long as every key which the query sees
is without m, those of the exact windows too, and nothing stands beside the scores (sink logits) or bends
them (soft-capping). What is left has Sigma - m m^T as its second moment, and the map is made for that, and for
queries mostly by what errors of their scores cost the model, where that was measured (`mixed_bits.py`). After OptR
(arXiv 2608.02691), which removes the mean before its rotations.

Half of the weight of keys is the attention that they get. An error e of a key moves the scores of all queries, but an
output only by the weight p of its token: by p (q . e) (v - out). A map that is best for the usual key may be poor for
the few that are read. So the second moment and the mean of keys are halves of two, of all keys that caches would
compress and of the same keys by weight:

    a_j = sum over query heads and queries t of p_tj, where t - j > away,
    Sigma = (mean of k k^T + sum a k k^T / sum a) / 2,

and m likewise, the mean of their mixture. Nearer tokens are exact in caches, as are the first `sink`. Queries at
positions 0, every, 2 every, ... are asked. Half is what was tried (docs/results/positions.md); all of it would leave
out directions that no key which is read has in a short text.

Row vectors: stored = x @ down, x = stored @ up, query @ up^T meets stored. `G` kv heads, `H` query
heads, `D` head dim.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec import oscar

SHRINK = 1e-3
DEAD = 1e-8
FLOOR = 1e-4


def output_moment(w: np.ndarray, kv_heads: int) -> np.ndarray:
    """Return M [G, D, D] of values from the rows w [H, D, hidden] of the output projection: an error e of
    a value becomes p e W_h in the output of each query head h of the group, p its attention weight."""
    squares = w @ w.swapaxes(-1, -2)
    return squares.reshape(kv_heads, -1, *squares.shape[1:]).sum(1)


def regular(moment: np.ndarray) -> np.ndarray:
    """Give a second moment [D, D] full rank: raise channels without variance to DEAD of the largest, then
    replace SHRINK of the whole by its diagonal. This commutes with scaling channels (but for DEAD)."""
    variance = np.diagonal(moment)
    floored = np.maximum(variance, DEAD * variance.max())
    moment = (moment + moment.T) / 2 + np.diag(floored - variance)
    return (1 - SHRINK) * moment + SHRINK * np.diag(floored)


def balanced(noise: np.ndarray, sensitivity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return T [D, D] and sigma [D], falling, with T^T noise T = diag(sigma) = T^-1 sensitivity T^-T.

    L L^T = noise, L^T sensitivity L = Z sigma^2 Z^T, T = L^-T Z sigma^(1/2). sigma is at least FLOOR of
    its largest, where a direction would be stored far too small. A column has no sign of its own: its
    entry of largest magnitude is positive.
    """
    lower = np.linalg.cholesky(noise)
    squares, rotation = np.linalg.eigh(lower.T @ sensitivity @ lower)
    sigma = np.sqrt(np.maximum(squares[::-1], 0))
    sigma = np.maximum(sigma, FLOOR * sigma[0])
    down = np.linalg.inv(lower).T @ rotation[:, ::-1] * np.sqrt(sigma)
    top = np.abs(down).argmax(0)
    return down * np.sign(down[top, np.arange(len(top))]), sigma


def centred(k: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return keys after RoPE [..., D] without their calibrated mean [D]."""
    return k - mean


def about_mean(noise: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the covariance [D, D] of keys with second moment `noise` [D, D] and mean [D]."""
    return noise - np.outer(mean, mean)


def pair(down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (down M, M^T down^-1) [D, D], M = HP: the direction of largest sigma meets the constant
    function, which the bias of a group absorbs."""
    mix = oscar.mixing(len(down))
    return down @ mix, mix.T @ np.linalg.inv(down)


def cost(down: np.ndarray, noise: np.ndarray, sensitivity: np.ndarray) -> float:
    """Return N S of stored = x @ down, as above."""
    up = np.linalg.inv(down)
    return float(np.trace(down.T @ noise @ down) * np.trace(up @ sensitivity @ up.T))


def received(
    q: np.ndarray, k: np.ndarray, scale: float, sink: int = 64, away: int = 124, every: int = 8
) -> np.ndarray:
    """Return a [G, T] of one window: what causal attention of q [H, T, D] gives to k [G, T, D]."""
    heads, tokens, _ = q.shape
    out, group = np.zeros(k.shape[:2]), heads // len(k)
    for t in range(0, tokens, every):
        for head in range(heads):
            scores = k[head // group, : t + 1] @ q[head, t] * scale
            weights = np.exp(scores - scores.max())
            weights_afar = weights[: max(0, t - away)] / weights.sum()
            out[head // group, : len(weights_afar)] += weights_afar
    out[:, :sink] = 0
    return out


def weighted(k: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the second moments [G, D, D] and means [G, D] of keys k [G, T, D] that count a [G, T]."""
    share = a / a.sum(-1, keepdims=True)
    return np.einsum("gt,gtd,gte->gde", share, k, k), np.einsum("gt,gtd->gd", share, k)


def halves(k: np.ndarray, a: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return S [G, D, D] and the mean [G, D] of keys k [G, T, D], of which those of `stored` [T] are compressed."""
    plain = weighted(k, np.broadcast_to(stored, a.shape).astype(np.float64))
    read = weighted(k, a)
    return (plain[0] + read[0]) / 2, (plain[1] + read[1]) / 2
