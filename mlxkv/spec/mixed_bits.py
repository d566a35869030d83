"""THE SPEC of mixed bits (bits per direction by reverse water-filling: Cover & Thomas, 10.3.3), in NumPy float64.
Rules as in `affine.py`.

Reverse water-filling (Cover & Thomas, Elements of Information Theory, theorem 10.3.3) over the directions
of balanced maps (`balanced.py`), in whole bits and in blocks of 16: a block has 8, 4, 3, 2, 1 or 0 bits. Others
spend mixed bits, too: KVTC (arXiv 2511.01815), SVDq (2502.15304), WaterSIC-KV (NVIDIA's Model-Optimizer), AATC
(2608.14191), NOVA-KV (2608.04074), and Block-GTQ (2606.24033) by pairs of RoPE; its own are one budget for keys, values
and layers in one unit, directions of one width mixed so that one scale a token serves all widths, and levels that keep
the second moment.

Keys lose their mean first, as in `balanced.py`; values keep theirs. In balanced coordinates direction i of a
head has the second moment sigma_i of what is stored and sigma_i of what reads it, falling. The n directions
of one width b are mixed by an orthogonal matrix, so each has the mean of sigma in both.

A uniform quantizer has the step that is best for Gaussian numbers. Its decoded numbers are too small, since each
is the mean of its cell: scores of coded keys would be flatter than those of the exact keys in the windows beside
them, and outputs short of what values add up to. So levels are further apart than cells, by the gain that gives decoded
numbers the second moment of what was stored. The share f(b) of it is lost then, f(0) = 1, and the error costs

    C = f(b) (sum of sigma)^2 / n,  and for 0 bits, where nothing is mixed, C = sum of sigma^2.

For keys C is the variance of q . e, and the softmax sees q . e / sqrt(D) (models with another scale are
treated as if they had this one). For values it is |e W_o|^2, whose whole is the sum of sigma_values^2.

An error d of what attention of a kv head's query heads hands on changes the log-likelihood of a reply by g . d, and
KL by d^T F d / 2 to first order, F = E g g^T over tokens that the model draws itself (Fisher's information). With
attention weights p, a key's error changes the output by p (v - o) times the score's error, a value's by p e. So, summed
over the tokens that are compressed and averaged over queries, with S the second moment of values, a layer costs

    J = sum over kv heads of  a C_keys / D + b C_values / sum of sigma_values^2,
    a = E sum of p^2 (v - o)^T F (v - o),    b = E sum of p^2  tr(F S).

F is one for all query heads of a kv head, the sum of theirs, and errors of values are taken to lie in F as they do in
W_o. For three quarters of their weight queries count by what noise in their scores costs, w = sum of p^2 (v - o)^T F
(v - o) over the tokens that they read: the second moment of queries that keys' maps are made for is

    M = E q q^T / 4 + 3/4 E w q q^T / E w.

All of it would leave queries that read hardly anything far (w near 0) with so much noise that thousands of far tokens
together may get attention; KL doubled at 32K on Qwen2.5 (docs/results/positions.md).
Where a and b were not measured (models that cannot be differentiated, latents) a layer costs

    J = mean over kv heads of C_keys / D
      + sum over kv heads of C_values / sum over kv heads and directions of sigma_values^2,

the squared error of its output over the square of the output. Widths have the least sum of J over all layers whose
bytes fit the budget of the model; all kv heads of a layer share them. Of equal sums the one with fewer bits wins. Kv
heads that share one map have its sigma, each: bytes and J are sums and means over heads, not over maps.

Each stored direction is scaled by 1 / (gain step_b sqrt(mean of sigma)), step_b for variance 1, so levels of a token
of usual size are 1 apart in every width. Its scale r is the root mean square of gain step_b x over stored dims,
cells are r / gain wide, and x ~ r (code - (2^b - 1) / 2).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations_with_replacement, product

import numpy as np

from mlxkv.spec.affine import half
from mlxkv.spec.balanced import balanced
from mlxkv.spec.oscar import mixing

DIMS = 16
WIDTHS = (8, 4, 3, 2, 1)
READ_BY_COST = 0.75  # the share of queries' weight that is what noise in their scores costs
Widths = tuple[int, ...]


def moments(bits: int, step: float) -> tuple[float, float]:
    """Return E x^2 and E x x^ of decoded x^, for a Gaussian x of variance 1 and 2^bits levels, `step` apart, half of
    them negative."""
    half, square, product = 2 ** (bits - 1), 0.0, 0.0
    for i in range(half):
        low, high = i * step, (i + 1) * step if i < half - 1 else math.inf
        level = (i + 0.5) * step
        square += level**2 * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2)))
        product += 2 * level * (_density(low) - _density(high))
    return square, product


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def uniform_error(bits: int, step: float) -> float:
    """Return E (x - x^)^2."""
    square, product = moments(bits, step)
    return 1 - 2 * product + square


@lru_cache(maxsize=8)
def best_step(bits: int) -> float:
    """Return the step of least `uniform_error`, by golden section."""
    low, high, ratio = 2.0**-bits, 4.0 * 2 ** (1 - bits) + 2.0**-bits, (math.sqrt(5) - 1) / 2
    for _ in range(200):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if uniform_error(bits, a) < uniform_error(bits, b):
            high = b
        else:
            low = a
    return (low + high) / 2


@lru_cache(maxsize=8)
def gain(bits: int) -> float:
    """Return the ratio of level distance to cell width that makes E x^^2 = 1."""
    return 1 / math.sqrt(moments(bits, best_step(bits))[0])


@lru_cache(maxsize=8)
def error(bits: int) -> float:
    """Return f(b) = E (x - gain x^)^2; 1 for 0 bits."""
    if not bits:
        return 1.0
    return 2 - 2 * gain(bits) * moments(bits, best_step(bits))[1]


# --------------------------------------------------------------------------------------------------
# Bits.


def patterns(blocks: int) -> list[Widths]:
    """Return the bits of `blocks` blocks, never rising, the first at least 1 bit; blocks of 0 bits are left out."""
    rows = combinations_with_replacement((*WIDTHS, 0), blocks)
    return [tuple(b for b in row if b) for row in rows if row[0]]


def cost(sigma: np.ndarray, widths: Widths) -> float:
    """Return the sum over heads of C, for sigma [G, D]."""
    total, start = 0.0, 0
    for bits in dict.fromkeys(widths):
        count = DIMS * widths.count(bits)
        part = sigma[:, start : start + count]
        total += error(bits) * (part.sum(-1) ** 2).sum() / count
        start += count
    return float(total + (sigma[:, start:] ** 2).sum())


def stored_bits(widths: Widths) -> int:
    """Return the stored bits per token and head: codes in whole 32-bit words, and a scale of 16 bits."""
    return 32 * -(-DIMS * sum(widths) // 32) + 16


def exchange(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    fisher: np.ndarray,
    scale: float,
    sink: int = 64,
    away: int = 124,
    every: int = 8,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a and b [2, G] and w [H, T] of one window: causal attention of q [H, T, D] over k [G, T, D] and v [G, T,
    Dv], F [G, Dv, Dv]. Tokens behind the first `sink` that are more than `away` from a query are compressed; one query
    in `every`."""
    (heads, tokens, _), kv_heads = q.shape, len(k)
    w, squares, count = np.zeros((heads, tokens)), np.zeros(kv_heads), 0
    for t in range(0, tokens, every):
        if t - away <= sink:
            continue
        count += heads // kv_heads
        for head in range(heads):
            g = head // (heads // kv_heads)
            scores = k[g, : t + 1] @ q[head, t] * scale
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out = p @ v[g, : t + 1]
            for token in range(sink, t - away):
                d = v[g, token] - out
                w[head, t] += p[token] ** 2 * (d @ fisher[g] @ d)
                squares[g] += p[token] ** 2
    moment = v[:, sink:].swapaxes(-1, -2) @ v[:, sink:] / (tokens - sink)
    spread = w.reshape(kv_heads, -1).sum(-1)
    return np.stack([spread, squares * np.einsum("gde,gde->g", fisher, moment)]) / count, w


def readers(q: np.ndarray, w: np.ndarray, kv_heads: int) -> np.ndarray:
    """Return M [G, D, D] of queries q [H, T, D] that cost w [H, T]."""
    total = 0.0
    for share, weights in ((1 - READ_BY_COST, np.ones_like(w)), (READ_BY_COST, w)):
        squares = np.einsum("ht,htd,hte->hde", weights, q, q)
        squares = squares.reshape(kv_heads, -1, *squares.shape[1:]).sum(1)
        total += share * squares / weights.reshape(kv_heads, -1).sum(-1)[:, None, None]
    return total


def side_cost(
    sigma: np.ndarray, widths: Widths, norms: np.ndarray, measured: np.ndarray | None = None
) -> float:
    """Return the contribution of a layer's keys or values to J, for sigma [G, D].

    norms: [G], D for keys, the sum of sigma^2 for values; heads with norm 0 cost 0. measured: a or b [G], if measured.
    """
    if measured is None:
        return cost(sigma, widths) / norms.sum() if norms.sum() else 0.0
    heads = zip(measured, sigma[:, None], norms, strict=True)
    return sum(share * cost(head, widths) / norm for share, head, norm in heads if norm)


def allotted(
    layers: list[tuple[np.ndarray, np.ndarray]],
    rate: float,
    measured: list[np.ndarray] | None = None,
) -> list[tuple[Widths, Widths]]:
    """Return the widths of keys and of values of each layer for sigma [G, D] of both and `rate` bits a value of
    all kv heads; measured: a and b of each. All that could be best are tried: for a few layers of few blocks."""
    budget = rate * sum(keys.size + values.size for keys, values in layers) + 1e-9
    best: list[tuple[float, int, list[tuple[Widths, Widths]]]] = [(0.0, 0, [])]
    for sides, shares in zip(layers, measured or [(None, None)] * len(layers), strict=True):
        norms = np.full(len(sides[0]), sides[0].shape[1]), (sides[1] ** 2).sum(-1)
        costs = [
            {widths: side_cost(sigma, widths, *more) for widths in patterns(sigma.shape[1] // DIMS)}
            for sigma, *more in zip(sides, norms, shares, strict=True)
        ]
        own: dict[int, tuple[float, int, tuple[Widths, Widths]]] = {}
        for k, v in product(*costs):
            bits = len(sides[0]) * stored_bits(k) + len(sides[1]) * stored_bits(v)
            j = costs[0][k] + costs[1][v]
            if bits not in own or j < own[bits][0]:
                own[bits] = j, bits, (k, v)
        best = [(c + j, b + bits, [*w, both]) for c, b, w in best for j, bits, both in own.values()]
    return min((one for one in best if one[1] <= budget), key=lambda one: one[:2])[2]


# --------------------------------------------------------------------------------------------------
# Maps and codes.


def pair(
    noise: np.ndarray, sensitivity: np.ndarray, widths: Widths
) -> tuple[np.ndarray, np.ndarray]:
    """Return down [D, R] and up [R, D] of one head: stored = x @ down, x ~ stored @ up."""
    whole, sigma = balanced(noise, sensitivity)
    back, start = np.linalg.inv(whole), 0
    down: list[np.ndarray] = []
    up: list[np.ndarray] = []
    for bits in dict.fromkeys(widths):
        part = slice(start, start + DIMS * widths.count(bits))
        mix = mixing(part.stop - part.start)
        size = gain(bits) * best_step(bits) * np.sqrt(sigma[part].mean())
        down.append(whole[:, part] @ mix / size)
        up.append(mix.T @ back[part] * size)
        start = part.stop
    return np.concatenate(down, 1), np.concatenate(up)


def tables(widths: Widths) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distance of levels for variance 1, the gain and the largest code of every stored dim, [R] each."""
    gains = np.array([gain(b) for b in widths])
    steps = gains * np.array([best_step(b) for b in widths])
    return steps.repeat(DIMS), gains.repeat(DIMS), (2.0 ** np.array(widths) - 1).repeat(DIMS)


def scale(x: np.ndarray, widths: Widths) -> np.ndarray:
    """Return r [..., 1] of stored x [..., R], before it is rounded to float16."""
    return np.sqrt(((x * tables(widths)[0]) ** 2).mean(-1, keepdims=True))


def encode(x: np.ndarray, widths: Widths) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (uint8 [..., R]) and scale (float64 holding float16 values, [..., 1]) of stored x [..., R]."""
    x, (_, gains, top) = np.asarray(x, np.float64), tables(widths)
    r = half(scale(x, widths))
    codes = np.clip(np.rint(x * gains / np.where(r > 0, r, 1.0) + top / 2), 0, top)
    return codes.astype(np.uint8), r


def decode(codes: np.ndarray, r: np.ndarray, widths: Widths) -> np.ndarray:
    """Return r (code - (2^b - 1) / 2): [..., R]."""
    return r * (codes - tables(widths)[2] / 2)
