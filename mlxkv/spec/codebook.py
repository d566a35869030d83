"""THE SPEC of codebook codes (TurboQuant, arXiv 2504.19874), in NumPy float64.

A random orthogonal matrix rotates a vector, its norm is stored, and every coordinate of the unit vector
becomes the nearest level of the best codebook for a uniform point on the sphere. Rules as in
`affine.py`; row vectors throughout.

Letters: `R` stored dims, `b` bits per coordinate, `T` tokens. A level is a coordinate of the unit
vector, of the order of 1 / sqrt(R).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mlxkv.spec import affine

# --------------------------------------------------------------------------------------------------
# Random numbers that are the same on every machine, and the matrices made of them.


@lru_cache(maxsize=32)
def gaussian(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return standard normal numbers by Box and Muller: numbers 2 i and 2 i + 1 are the cosine and sine
    branch of uniforms 2 i and 2 i + 1, the upper 53 bits of `affine.splitmix`, plus half."""
    count = int(np.prod(shape))
    uniform = ((affine.splitmix(count + count % 2, seed) >> np.uint64(11)) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniform[::2])), 2 * np.pi * uniform[1::2]
    out = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).ravel()
    return out[:count].reshape(shape)


@lru_cache(maxsize=32)
def random_rotation(dims: int, seed: int = 0) -> np.ndarray:
    """Return a uniformly distributed orthogonal matrix [D, D]: Gram and Schmidt on the columns of a
    Gaussian matrix, that is the QR factorisation of Alg. 1 with a positive diagonal."""
    q = gaussian((dims, dims), seed).copy()
    for i in range(dims):
        for _ in range(2):  # the second pass removes rounding errors of the first
            q[:, i] -= q[:, :i] @ (q[:, :i].T @ q[:, i])
        q[:, i] /= np.sqrt(q[:, i] @ q[:, i])
    return q


# --------------------------------------------------------------------------------------------------
# The codebook: Lloyd and Max for the exact density of a coordinate (Lemma 1),
# f(x) = Gamma(R/2) / (sqrt(pi) Gamma((R-1)/2)) (1 - x^2)^((R-3)/2).


def _cosine_integral(power: int, angle: np.ndarray) -> np.ndarray:
    """Integrate cos^power from 0 to each angle, by the reduction formula."""
    if power == 0:
        return angle
    if power == 1:
        return np.sin(angle)
    lower = _cosine_integral(power - 2, angle)
    return (np.cos(angle) ** (power - 1) * np.sin(angle) + (power - 1) * lower) / power


def cells(boundaries: np.ndarray, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (probability, centroid) of the cells between boundaries [n - 1], from -1 to 1.

    With x = sin(a) the density is cos^(R-2)(a) da, and its first moment is closed:
    -cos^(R-1)(a) / (R - 1).
    """
    angle = np.concatenate([[-np.pi / 2], np.arcsin(boundaries), [np.pi / 2]])
    mass = np.diff(_cosine_integral(dims - 2, angle))
    moment = -np.diff(np.cos(angle) ** (dims - 1)) / (dims - 1)
    return mass / mass.sum(), moment / mass


@lru_cache(maxsize=64)
def sphere_levels(dims: int, bits: int) -> np.ndarray:
    """Return [2^b] levels, ascending: the fixed point of "boundaries are mid-points, levels are centroids"
    (eq. 4), which is unique because the density is log-concave for R > 3."""
    count = 2**bits
    levels = (np.arange(count, dtype=np.float64) + 0.5 - count / 2) * 5 / (count * np.sqrt(dims))
    for _ in range(10_000):
        _, centres = cells((levels[1:] + levels[:-1]) / 2, dims)
        centres = (centres - centres[::-1]) / 2
        step, levels = np.abs(centres - levels).max(), centres
        if step < 1e-14:
            break
    return levels


# --------------------------------------------------------------------------------------------------
# Codes.


def codebook_encode(x: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode x [..., R] into codes (uint8 [..., R]) and scale ([..., 1], float64 holding float16 values).

    Alg. 1: norm = ||x||, code = the nearest level to x / norm, at a boundary the one nearer to 0, at
    0 the lower middle one; scale = norm. Vectors of zeros get scale 0.
    """
    x = np.asarray(x, np.float64)
    norm = np.sqrt((x * x).sum(-1, keepdims=True))
    unit = x / np.where(norm > 0, norm, 1.0)
    middle = len(levels) // 2
    steps = np.searchsorted((levels[1:] + levels[:-1])[middle:] / 2, np.abs(unit), side="left")
    codes = np.where(unit > 0, middle + steps, middle - 1 - steps).astype(np.uint8)
    return codes, affine.half(norm)


def codebook_decode(codes: np.ndarray, scale: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return scale * level: [..., R]."""
    return scale * levels[codes]


# --------------------------------------------------------------------------------------------------
# What experiments measure and no preset has. Alg. 2 (QJL): the signs of random projections of what the
# first stage leaves. Section 4.3: some channels have more bits, each part with its own rotation and norm.


def qjl_encode(rest: np.ndarray, projections: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode rest [..., R] into signs (uint8 [..., R], 1 where the projection is above 0) and its length
    ([..., 1], float64 holding float16 values). projections: [R, R] standard normal, one a column."""
    signs = (rest @ projections > 0).astype(np.uint8)
    return signs, affine.half(np.sqrt((rest * rest).sum(-1, keepdims=True)))


def qjl_decode(signs: np.ndarray, length: np.ndarray, projections: np.ndarray) -> np.ndarray:
    """Return sqrt(pi / 2) / R length (+-1) projections^T, whose inner product with any q is q . rest in the
    mean over projections."""
    return np.sqrt(np.pi / 2) / len(projections) * length * ((2.0 * signs - 1) @ projections.T)


def split_decode(x: np.ndarray, chosen: np.ndarray, bits: int, seed: int) -> np.ndarray:
    """Return x [T, D] of one head, not rotated yet, as decoded from bits + 1 in the channels `chosen` (boolean
    [D]) and `bits` in the others."""
    out = np.empty(x.shape)
    for channels, width in ((chosen, bits + 1), (~chosen, bits)):
        dims = int(channels.sum())
        turn, levels = random_rotation(dims, seed), sphere_levels(dims, width)
        codes, scale = codebook_encode(x[:, channels] @ turn, levels)
        out[:, channels] = codebook_decode(codes, scale, levels) @ turn.T
    return out
