"""THE SPEC of polar trees (PolarQuant of Han et al., arXiv 2502.02617), in NumPy float64.

A vector, rotated by a random orthogonal matrix, becomes one radius and 15 angles for each 16 of its
dims: neighbours are paired into (radius, angle), their radii again, four times. Rules as in `affine.py`.

Letters: `R` stored dims, a multiple of 16, `T` tokens. Level 1 pairs dims, level 4 gives the radii.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mlxkv.spec import affine

LEVELS, BITS = 4, (4, 2, 2, 2)  # bits of an angle, by level (section 4.1)
TURN = 2 * np.pi


def to_polar(x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return radii [..., R/16] and the angles of the levels, [..., R/2] .. [..., R/16], of x [..., R] (Def. 1).

    Level 1 lies in [0, 2 pi), the others, of radii, in [0, pi/2]; the angle of (0, 0) is 0.
    """
    radii = np.asarray(x, np.float64)
    angles: list[np.ndarray] = []
    for _ in range(LEVELS):
        first, second = radii[..., ::2], radii[..., 1::2]
        angle = np.arctan2(second, first)
        angles.append(np.where(angle < 0, angle + TURN, angle))
        radii = np.sqrt(first * first + second * second)
    return radii, angles


def from_polar(radii: np.ndarray, angles: list[np.ndarray]) -> np.ndarray:
    """Invert `to_polar`: split radii into (r cos a, r sin a), level by level (Def. 1)."""
    for angle in reversed(angles):
        pairs = np.stack([radii * np.cos(angle), radii * np.sin(angle)], -1)
        radii = pairs.reshape(*pairs.shape[:-2], -1)
    return radii


def angle_density(angle: np.ndarray, level: int) -> np.ndarray:
    """Return the density of angles of a Gaussian vector, up to a factor (Lemma 2): level 1 is uniform on the
    circle, level l is sin^(2^(l-1) - 1)(2 a) on [0, pi/2]."""
    return np.ones_like(angle) if level == 1 else np.sin(2 * angle) ** (2 ** (level - 1) - 1)


@lru_cache(maxsize=8)
def angle_codebook(level: int) -> np.ndarray:
    """Return [2^bits] angles, ascending, the best for `angle_density`: k-means on endless data (section 4.1).
    Each is the centroid of its cell; boundaries are mid-points."""
    count = 2 ** BITS[level - 1]
    end = TURN if level == 1 else np.pi / 2
    codebook = (np.arange(count, dtype=np.float64) + 0.5) * end / count
    nodes, weights = np.polynomial.legendre.leggauss(40)
    for _ in range(1000 if level > 1 else 0):  # uniform angles start at the fixed point
        edges = np.concatenate([[0.0], (codebook[1:] + codebook[:-1]) / 2, [end]])
        half = np.diff(edges)[:, None] / 2
        a = edges[:-1, None] + half * (nodes + 1)
        mass = angle_density(a, level) * weights
        codebook = (mass * a).sum(-1) / mass.sum(-1)
    return codebook


def tree_encode(x: np.ndarray, codebooks: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Encode x [..., R] into codes of the levels (uint8 [..., R/2] .. [..., R/16]) and radii ([..., R/16],
    float64 holding float16 values). A code is the nearest angle, the lower one at a boundary."""
    radii, angles = to_polar(x)
    codes = [
        np.searchsorted((book[1:] + book[:-1]) / 2, angle, side="left").astype(np.uint8)
        for book, angle in zip(codebooks, angles, strict=True)
    ]
    return codes, affine.half(radii)


def tree_decode(
    codes: list[np.ndarray], radii: np.ndarray, codebooks: list[np.ndarray]
) -> np.ndarray:
    """Decode to [..., R]."""
    return from_polar(radii, [book[c] for book, c in zip(codebooks, codes, strict=True)])


def fit_codebook(
    angles: np.ndarray, marked: np.ndarray, start: np.ndarray, steps: int
) -> np.ndarray:
    """Run Lloyd's k-means in one dimension from `start` [n] on the angles [m] where `marked` (boolean [m]).

    A centroid without angles stays. The paper starts with random k-means++; the codebook of the density
    is closer, and the same every time.
    """
    book, angles = start.copy(), angles[marked]
    for _ in range(steps):
        codes = np.searchsorted((book[1:] + book[:-1]) / 2, angles, side="left")
        for i in range(len(book)):
            if (codes == i).any():
                book[i] = angles[codes == i].mean()
    return book
