"""THE SPEC of transform coding of keys and values, in NumPy float64. Rules as in `affine.py`.

Siblings of `balanced.py`, published in the same autumn, as far as their text could be read:

NOVA-KV ("Spend Bits Where Queries Look", arXiv 2608.04074): abstract, and the authors' code
    (Amir-zsh/nova-kv, calibration/fit_vq_codebook.py and group_vq_codec.py). `attention_map`,
    `stratified`, `codebook`, `fp8`, `grouped_encode`, `grouped_decode`.
OptR ("Output-Aware Rotation", arXiv 2608.02691): abstract, and the authors' code
    (daniel-eai/Output-Aware-INT2-KV-Cache-Quantization, optr/calibrate_optr.py, rotation/compute_k_mean.py):
    the mean of keys that `centred` removes. Its learned rotations are not here.
AATC ("KV Cache Compression Through the Lens of Transform Coding", arXiv 2608.14191): abstract and digests,
    not the paper. `water_filling` is the family: bits by direction. AATC whitens the projections, before RoPE;
    here directions come from the moments of keys after RoPE.
Dual-QK (arXiv 2610.09827): abstract and digests, not the paper. `partly_whitened` is the family: keys are
    flattened in part, queries concentrated. Its exponent, RoPE in buckets and pruning of channels are not here.

Row vectors: stored = x @ down, x = stored @ up, up = down^-1. `D` head dim, `N` rows, `E` numbers of a group.
"""

from __future__ import annotations

import numpy as np

GROUP, CENTROIDS = 4, 256  # NOVA-KV: 8 bits for 4 numbers
MOST = 8  # bits of a direction


def root(moment: np.ndarray, power: float) -> np.ndarray:
    """Return the symmetric power [D, D] of a positive moment."""
    values, vectors = np.linalg.eigh((moment + moment.T) / 2)
    return vectors * np.maximum(values, 1e-30) ** power @ vectors.T


# --------------------------------------------------------------------------------------------------
# OptR: key reparametrization.


def centred(k: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return keys after RoPE [..., D] without their calibrated mean [D].

    q . (k - mean) is q . k less a number that all keys of a query share, so softmax does not see it: exact for
    every position, as long as no key is left out and no sink logit stands beside them.
    """
    return k - mean


# --------------------------------------------------------------------------------------------------
# NOVA-KV: a map in which squared errors are errors of scores, and codebooks for groups.


def attention_map(noise: np.ndarray, reads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return down [D, D] = S^1/2 V and the variances [D], falling, of what is stored.

    noise: covariance of keys; reads: second moment S of queries. V are the eigenvectors of S^1/2 noise S^1/2.
    down down^T = S: the squared error of what is stored is that of scores, over the queries. The columns
    are those of `balanced.balanced`, each times the root of its sigma, and the variance is sigma^2.
    """
    half = root(reads, 0.5)
    values, vectors = np.linalg.eigh(half @ noise @ half)
    down = half @ vectors[:, ::-1]
    top = np.abs(down).argmax(0)
    return down * np.sign(down[top, np.arange(len(top))]), np.maximum(values[::-1], 0)


def stratified(dims: int, group: int = GROUP) -> np.ndarray:
    """Return the order [D] of directions by falling variance in groups: rank r goes to group r mod (D / group),
    so that the variances of every group have about the same product (equal volume)."""
    count = dims // group
    return np.arange(dims).reshape(group, count).T.reshape(-1)


def codebook(rows: np.ndarray, size: int, rounds: int = 25, seed: int = 0) -> np.ndarray:
    """Return `size` centroids [size, E] of rows [N, E]: Lloyd's algorithm from random rows. A centroid
    without rows takes the row that is farthest from its own."""
    rng = np.random.default_rng(seed)
    centres = rows[rng.permutation(len(rows))[:size]].copy()
    if len(rows) <= size:
        more = rows[rng.integers(0, len(rows), size - len(rows))]
        return np.concatenate([centres, more])
    for _ in range(rounds):
        nearest, distance = _nearest(rows, centres)
        count = np.bincount(nearest, minlength=size)
        sums = np.stack([np.bincount(nearest, x, minlength=size) for x in rows.T], 1)
        centres = sums / np.maximum(count, 1)[:, None]
        empty = np.flatnonzero(count == 0)
        centres[empty] = rows[np.argsort(-distance, kind="stable")[: len(empty)]]
    return centres


def _nearest(rows: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index [N] of the nearest centroid (the first of equals) and the squared distance [N]."""
    squares = (centres**2).sum(1) - 2 * rows @ centres.T
    nearest = squares.argmin(1)
    return nearest, squares[np.arange(len(rows)), nearest] + (rows**2).sum(1)


def fp8(x: np.ndarray) -> np.ndarray:
    """Round an array to float8 e5m2 (two bits of mantissa) times one scale, largest entry to 57344."""
    scale = max(np.abs(x).max(), 1e-12) / 57344.0
    y = x / scale
    power = np.floor(np.log2(np.maximum(np.abs(y), 2.0**-14)))  # below it: subnormal
    step = 2.0 ** (power - 2)
    return np.rint(y / step) * step * scale


def grouped_encode(stored: np.ndarray, books: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [N, D / E] and the root mean square [N] (float16 values) of rows [N, D], in the order of
    `stratified`; books: [D / E, size, E], of rows divided by their root mean square."""
    scale = np.sqrt((stored**2).mean(-1)).astype(np.float16).astype(np.float64)
    rows = stored / np.where(scale > 0, scale, 1.0)[:, None]
    parts = rows.reshape(len(rows), len(books), -1)
    codes = [_nearest(parts[:, g], book)[0] for g, book in enumerate(books)]
    return np.stack(codes, 1), scale


def grouped_decode(codes: np.ndarray, scale: np.ndarray, books: np.ndarray) -> np.ndarray:
    """Return rows [N, D]."""
    rows = np.stack([book[codes[:, g]] for g, book in enumerate(books)], 1)
    return rows.reshape(len(codes), -1) * scale[:, None]


# --------------------------------------------------------------------------------------------------
# Bits by direction: reverse water-filling.


def water_level(variances: np.ndarray, rate: float) -> tuple[float, np.ndarray]:
    """Return the level and the bits [D], real numbers of mean `rate`, that give Gaussian directions of these
    variances the least squared error: bits = log2(variance / level) / 2 where that is positive, else 0
    (Cover and Thomas, Elements of Information Theory, theorem 10.3.3)."""
    falling = np.sort(variances)[::-1]
    for count in range(len(falling), 0, -1):
        level = np.exp2((np.log2(falling[:count]).sum() - 2 * rate * len(falling)) / count)
        if falling[count - 1] >= level:
            break
    return float(level), np.maximum(np.log2(np.maximum(variances, 1e-300) / level) / 2, 0)


def water_filling(variances: np.ndarray, total: int, errors: np.ndarray) -> np.ndarray:
    """Return whole bits [D] of sum `total`, given one after the other to where they gain most.

    errors: [MOST + 1], the squared error of a quantizer of 0, 1, ... bits for variance 1; 4^-b by theory.
    The least error of all allocations where each bit gains less than the one before.
    """
    bits = np.zeros(len(variances), int)
    gains = np.append(errors[:-1] - errors[1:], -np.inf)
    for _ in range(total):
        bits[(variances * gains[bits]).argmax()] += 1
    return bits


def levels_encode(x: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode white rows [N, D] by `bits` [D]: one scale a row, the largest |entry| of directions that have
    bits, and 2^b equal cells from -scale to scale. Returns codes [N, D] (0 where there are no bits) and
    scale [N] (float16 values)."""
    kept = bits > 0
    scale = np.abs(x[:, kept]).max(-1).astype(np.float16).astype(np.float64)
    cells = 2.0**bits
    place = x / np.where(scale > 0, scale, 1.0)[:, None]
    codes = np.clip(np.floor((place + 1) / 2 * cells), 0, cells - 1)
    return np.where(kept, codes, 0).astype(int), scale


def levels_decode(codes: np.ndarray, scale: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Return rows [N, D]: the middle of each cell, 0 where there are no bits."""
    cells = 2.0**bits
    return np.where(bits > 0, (2 * codes + 1) / cells - 1, 0.0) * scale[:, None]


# --------------------------------------------------------------------------------------------------
# Flat keys, sharp queries.


def partly_whitened(
    noise: np.ndarray, reads: np.ndarray, power: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return down [D, D] = noise^(-power / 2) U and the second moment [D] of queries in it, falling.

    power 0: a rotation that diagonalizes what queries read (U of OSCAR); 1: stored keys are white. In between keys
    are flatter than they were, and queries, q @ down^-T, concentrate on the first directions.
    """
    back = root(noise, power / 2)
    values, vectors = np.linalg.eigh(back @ reads @ back)
    return root(noise, -power / 2) @ vectors[:, ::-1], np.maximum(values[::-1], 0)
