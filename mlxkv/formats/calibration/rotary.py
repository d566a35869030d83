"""Measure how keys turn with their position, from the same keys at several positions. NumPy float64.

No config is read: scaled, partial and interleaved RoPE, and none at all, are seen in what keys do. Spec:
`mlxkv.spec.positions`. Letters: `N` rows, `D` head dim, `P` pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

STILL = 16  # rounding errors: a pair that moves less does not turn
OFF = 0.03  # largest error of turned rows, as a share: float32 angles are off by .008 at position 131,072


@dataclass(frozen=True, eq=False)
class Rotary:
    """Pairs of channels [P, 2] that turn together, and by how much a position [P], radians (signed)."""

    pairs: np.ndarray
    frequencies: np.ndarray

    def turned(self, x: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Return x [..., N, D], row n turned by t[n] positions."""
        out, (a, b) = np.array(x, np.float64), self.pairs.T
        angle = np.asarray(t, np.float64)[:, None] * self.frequencies
        cos, sin = np.cos(angle), np.sin(angle)
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., a] * sin + x[..., b] * cos
        return out


def measured(rows: Mapping[int, np.ndarray], resolution: float) -> Rotary | None:
    """Return how `rows` turn, or None where they do not turn as RoPE does.

    rows: [N, D] by position, the same N keys; positions 0, 1, 4, 16, ... (`positions`), and any others, which are
    only checked. resolution: of the numbers, as 2^-8 of bfloat16.

    x_a^2 + x_b^2 does not change in a pair, so its partner is the channel whose squares change by the opposite.
    Frequencies are refined from one position to the next, four times as far: an error of 45 degrees is allowed there,
    and the last one has the precision of the farthest position.
    """
    start = np.asarray(rows[0], np.float64)
    others = {t: np.asarray(x, np.float64) for t, x in sorted(rows.items()) if t}
    moved = np.concatenate([x**2 - start**2 for x in others.values()])  # [N * positions, D]
    norms = np.sqrt((moved**2).sum(0))
    least = STILL * resolution * np.sqrt((start**4).sum(0) * len(others))
    turning = np.flatnonzero(norms > least)
    gap = norms[:, None] ** 2 + norms**2 + 2 * moved.T @ moved  # |d_a + d_b|^2
    np.fill_diagonal(gap, np.inf)
    partner = gap.argmin(1)
    if (partner[partner[turning]] != turning).any():
        return None
    found = {(min(a, b), max(a, b)) for a, b in zip(turning, partner[turning], strict=True)}
    pairs = np.array(sorted(found), int).reshape(-1, 2)
    z = start[:, pairs[:, 0]] + 1j * start[:, pairs[:, 1]]
    w, t = np.zeros(len(pairs)), 1
    while t in others:
        y = others[t][:, pairs[:, 0]] + 1j * others[t][:, pairs[:, 1]]
        phase = np.angle((y * z.conj()).sum(0))
        w = (phase + 2 * np.pi * np.rint((w * t - phase) / (2 * np.pi))) / t
        t *= 4
    found = Rotary(pairs, w)
    size = np.sqrt((start**2).mean())
    for t, x in others.items():
        off = np.sqrt(((found.turned(start, np.full(len(start), t)) - x) ** 2).mean())
        if not off <= max(OFF, 4 * resolution) * size:
            return None
    return found


def positions(longest: int) -> list[int]:
    """Return the positions that `measured` wants for a model of `longest`: 0, powers of 4, and two that check them."""
    powers = [4**i for i in range(20) if 4**i < longest]
    return sorted({0, *powers, longest * 2 // 3, longest - 1})
