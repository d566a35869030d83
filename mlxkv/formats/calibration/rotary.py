"""Measure how keys rotate with their position, from the same keys at several positions, and average moments over
positions. NumPy float64.

No config is read: scaled, partial and interleaved RoPE, and none at all, are seen in what keys do. Spec:
`mlxkv.spec.positions`. Letters: `G` kv heads, `N` rows, `D` head dim, `P` pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Span = tuple[int, int]  # positions from and to, without the last
DEFAULT_CONTEXT = 1 << 15  # the context of a model that names none
SHORTEST = 1024  # positions of the shortest session
STILL = 16  # rounding errors: a pair that moves less does not rotate
# largest error of rotated rows, as a share: float32 angles are off by .008 at position 131,072
OFF = 0.03


@dataclass(frozen=True, eq=False)
class Rotary:
    """Pairs of channels [P, 2] that rotate together, and by how much a position [P], radians (signed)."""

    pairs: np.ndarray
    frequencies: np.ndarray

    def rotate(self, x: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Return x [..., N, D], row n rotated by t[n] positions."""
        partner, cos, sin = self.wheel(t, x.shape[-1])
        x = np.asarray(x, np.float64)
        return x * cos + x[..., partner] * sin

    def wheel(self, t: np.ndarray, dims: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return partner [D], cos and sin [N, D]: a row x rotates by t[n] as x * cos + x[partner] * sin."""
        t, (a, b) = np.asarray(t, np.float64), self.pairs.T
        partner, cos, sin = np.arange(dims), np.ones((len(t), dims)), np.zeros((len(t), dims))
        partner[a], partner[b] = b, a
        angle = t[:, None] * self.frequencies
        cos[:, a] = cos[:, b] = np.cos(angle)
        sin[:, b] = np.sin(angle)
        sin[:, a] = -sin[:, b]
        return partner, cos, sin

    def moment_over(self, moments: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
        """Return the mean of R(t) S R(t)^T over each span, and over `spans`, of moments S [G, D, D] at position 0."""
        u, theta = self._planes(moments.shape[-1])
        factors = _harmonics(theta[:, None] - theta, spans)
        return np.real(u @ (u.conj().T @ moments @ u * factors) @ u.conj().T)

    def mean_over(self, means: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
        """Return the same of means [G, D] at position 0, rotated with it."""
        u, theta = self._planes(means.shape[-1])
        return np.real(means @ u.conj() * _harmonics(theta, spans) @ u.T)

    def _planes(self, dims: int) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvectors [D, D] of R, a column each, and radians a position [D]."""
        u, theta, (a, b) = np.eye(dims, dtype=complex), np.zeros(dims), self.pairs.T
        u[a, a] = u[a, b] = np.sqrt(0.5)
        u[b, a], u[b, b] = -1j * np.sqrt(0.5), 1j * np.sqrt(0.5)
        theta[a], theta[b] = self.frequencies, -self.frequencies
        return u, theta


def _harmonics(w: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return the mean of exp(j w t) over each span, and over `spans`, for w of any shape."""
    cycles = w / (2 * np.pi)
    cycles = cycles - np.rint(cycles)
    means = (
        np.exp(1j * np.pi * cycles * (start + stop - 1))
        * np.sinc(cycles * (stop - start))
        / np.sinc(cycles)
        for start, stop in spans
    )
    return sum(means, np.zeros(w.shape)) / len(spans)


def contexts(longest: int) -> list[Span]:
    """Return the spans of positions that a calibration averages over for a model of `longest`: sessions of that
    length, of half of it, and so on, which count alike. Spec: `positions.contexts`."""
    spans = [(0, longest)]
    while (half := spans[-1][1] // 2) >= SHORTEST:
        spans.append((0, half))
    return spans


def drawn(start: int, count: int, spans: Sequence[Span]) -> np.ndarray:
    """Return positions for rows start .. start + count, spread evenly over each of `spans`, the same every time."""
    index = np.arange(start, start + count)
    ends = np.array(spans)[index % len(spans)]
    share = index // len(spans) * (np.sqrt(5) - 1) / 2 % 1
    return ends[:, 0] + (share * (ends[:, 1] - ends[:, 0])).astype(int)


def measured(rows: Mapping[int, np.ndarray], *resolutions: float) -> Rotary | None:
    """Return how `rows` rotate, or None where they do not rotate as RoPE does.

    rows: [N, D] by position, the same N keys; positions 0, 1, 4, 16, ... (`positions`), and any others, which are
    only checked. resolutions: of the numbers, as 2^-8 of bfloat16, the finest first: what rotates by float32 may have
    been computed in 16 bits from what depends on the position.
    """
    return next((x for r in resolutions if (x := _measured(rows, r)) is not None), None)


def _measured(rows: Mapping[int, np.ndarray], resolution: float) -> Rotary | None:
    """Return how `rows` rotate by numbers of one resolution.

    x_a^2 + x_b^2 does not change in a pair, so its partner is the channel whose squares change by the opposite.
    Frequencies are refined from one position to the next, four times as far: an error of 45 degrees is allowed there,
    and the last one has the precision of the farthest position.
    """
    start = np.asarray(rows[0], np.float64)
    later = {t: np.asarray(x, np.float64) for t, x in sorted(rows.items()) if t}
    moved = np.concatenate([x**2 - start**2 for x in later.values()])  # [N * positions, D]
    norms = np.sqrt((moved**2).sum(0))
    noise_floor = STILL * resolution * np.sqrt((start**4).sum(0) * len(later))
    rotating = np.flatnonzero(norms > noise_floor)
    gap = norms[:, None] ** 2 + norms**2 + 2 * moved.T @ moved  # |d_a + d_b|^2
    np.fill_diagonal(gap, np.inf)
    partner = gap.argmin(1)
    if (partner[partner[rotating]] != rotating).any():
        return None
    found = {(min(a, b), max(a, b)) for a, b in zip(rotating, partner[rotating], strict=True)}
    pairs = np.array(sorted(found), int).reshape(-1, 2)
    z = start[:, pairs[:, 0]] + 1j * start[:, pairs[:, 1]]
    w, t = np.zeros(len(pairs)), 1
    while t in later:
        y = later[t][:, pairs[:, 0]] + 1j * later[t][:, pairs[:, 1]]
        phase = np.angle((y * z.conj()).sum(0))
        w = (phase + 2 * np.pi * np.rint((w * t - phase) / (2 * np.pi))) / t
        t *= 4
    found = Rotary(pairs, w)
    size = np.sqrt((start**2).mean())
    for t, x in later.items():
        off = np.sqrt(((found.rotate(start, np.full(len(start), t)) - x) ** 2).mean())
        if not off <= max(OFF, 4 * resolution) * size:
            return None
    return found


def positions(longest: int) -> list[int]:
    """Return the positions that `measured` wants for a model of `longest`: 0, powers of 4, and two that check them."""
    powers = [4**i for i in range(20) if 4**i < longest]
    return sorted({0, *powers, longest * 2 // 3, longest - 1})
