"""Compute codebooks: levels on a sphere, angles of a polar tree. NumPy float64.

Spec: `mlxkv.spec.codebook.sphere_levels`, `mlxkv.spec.polar_tree.angle_codebook`. The spec iterates to the
same fixed points; Newton's method needs a few steps.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

TURN = 2 * np.pi
NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)
LLOYD, NEWTON = 8, 12  # steps


def _sphere_mass(boundaries: np.ndarray, dims: int) -> np.ndarray:
    """Return the distribution function times a constant: the integral of cos^(R-2) up to asin(boundary)."""
    angle = np.arcsin(boundaries)
    cosine, sine = np.cos(angle), np.sin(angle)
    out, start = (angle, 2) if dims % 2 == 0 else (sine, 3)
    for power in range(start, dims - 1, 2):
        out = (cosine ** (power - 1) * sine + (power - 1) * out) / power
    return out


@lru_cache(maxsize=256)
def sphere(dims: int, bits: int) -> np.ndarray:
    """Return the [2^bits] best levels, ascending and read-only, for the coordinates of a uniform point on the
    sphere in `dims` dims, at least 4 (TurboQuant, eq. 4)."""
    count = 2**bits

    def density(x):
        return (1 - x * x) ** ((dims - 3) / 2)

    def centroids(edges):
        mass = np.diff(_sphere_mass(edges, dims))
        return -np.diff((1 - edges * edges) ** ((dims - 1) / 2)) / (dims - 1) / mass, mass

    start = (np.arange(count) + 0.5 - count / 2) * 5 / (count * np.sqrt(dims))
    return _fixed_point(start, (-1.0, 1.0), density, centroids)


@lru_cache(maxsize=8)
def angles(level: int, bits: int) -> np.ndarray:
    """Return the [2^bits] best angles, ascending and read-only, for level 1, 2, .. of a polar tree (Han et al.,
    Lemma 2)."""
    count, end = 2**bits, TURN if level == 1 else np.pi / 2
    power = 0 if level == 1 else 2 ** (level - 1) - 1

    def density(a):
        return np.sin(2 * a) ** power if power else np.ones_like(a)

    def centroids(edges):
        half = np.diff(edges)[:, None] / 2
        a = edges[:-1, None] + half * (NODES + 1)
        mass = density(a) * WEIGHTS * half
        return (mass * a).sum(-1) / mass.sum(-1), mass.sum(-1)

    return _fixed_point((np.arange(count) + 0.5) * end / count, (0.0, end), density, centroids)


def _fixed_point(levels: np.ndarray, ends: tuple[float, float], density, centroids) -> np.ndarray:
    """Move levels to the centroids of their cells, whose boundaries are mid-points: a few steps of Lloyd's
    method, then Newton's with the exact, tridiagonal derivative."""

    def cells(levels):
        edges = np.concatenate([[ends[0]], (levels[1:] + levels[:-1]) / 2, [ends[1]]])
        return edges, *centroids(edges)

    for _ in range(LLOYD):
        levels = cells(levels)[1]
    for _ in range(NEWTON):
        edges, centres, mass = cells(levels)
        slope = density(edges) / 2  # a boundary moves half as far as either level
        slope[[0, -1]] = 0.0
        lower, upper = slope[:-1] * (centres - edges[:-1]), slope[1:] * (edges[1:] - centres)
        down, up = lower / mass, upper / mass
        jacobian = np.diag(down + up) + np.diag(up[:-1], 1) + np.diag(down[1:], -1)
        step = np.linalg.solve(np.eye(len(levels)) - jacobian, centres - levels)
        levels = levels + step
    levels.flags.writeable = False
    return levels


def polynomial(dims: int, bits: int) -> np.ndarray:
    """Return [2^(b-1)]: c_0, c_1, .. of the odd polynomial c_0 u + c_1 u^3 + .. through the levels of `sphere`,
    with u = (code - (2^b - 1) / 2) / 2^b. Kernels read it in place of a table."""
    table, terms = sphere(dims, bits), 2 ** (bits - 1)
    u = (np.arange(terms) + 0.5) / 2**bits
    return np.linalg.solve(u[:, None] ** (2 * np.arange(terms) + 1), table[terms:])
