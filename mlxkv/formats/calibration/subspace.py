"""Make low-rank bases from a calibration, and measure how well a basis fits. NumPy float64.

A calibration file stores no bases: they follow from the second moment of queries, in its eigenvectors, and
of keys (values), in its balanced transform. Spec: `mlxkv.spec.oja`. Letters: `G` kv heads, `D` head dim, `R`
stored dims.
"""

from __future__ import annotations

import numpy as np

from mlxkv.formats import matrices
from mlxkv.formats.calibration.balance import SHRINK, Balance


def stored_moment(balance: Balance) -> np.ndarray:
    """Return the second moment [G, D, D] of keys (values): undo `down`, where it is diag(sigma), and the shrinkage."""
    up = np.linalg.inv(balance.down.astype(np.float64))
    moment = up.swapaxes(-1, -2) @ (balance.sigma.astype(np.float64)[..., None] * up)
    diagonal = np.diagonal(moment, axis1=-2, axis2=-1)[:, None]
    return (moment - SHRINK * np.eye(moment.shape[-1]) * diagonal) / (1 - SHRINK)


def read_moment(values: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the moment [G, D, D] with these eigenvalues [G, D] and vectors [G, D, D]."""
    vectors = vectors.astype(np.float64)
    return (vectors * values[:, None].astype(np.float64)) @ vectors.swapaxes(-1, -2)


def basis(moment: np.ndarray, rank: int, mixed: bool = False) -> np.ndarray:
    """Return the leading directions [G, D, R]; mixed: times a sign-randomised Fourier transform of R dims."""
    _, vectors, _ = matrices.eigenbasis(moment)
    leading = vectors[..., ::-1][..., :rank]
    return leading @ matrices.srft(rank) if mixed else leading


def ranks(moment: np.ndarray, energy: float) -> np.ndarray:
    """Return the fewest directions with this share of the energy, [G] (OjaKV, A.2)."""
    values = np.maximum(np.linalg.eigvalsh(moment)[..., ::-1], 0)
    total = values.sum(-1, keepdims=True)
    share = np.cumsum(values, -1) / np.where(total > 0, total, 1)
    share = np.where(total > 0, share, 1)  # a dead head is held by anything
    return (share < energy - 1e-12).sum(-1) + 1


def residual(moment: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the residual-energy ratio [G] of a basis u [G, D, R] on rows with this second moment [G, D, D]."""
    inside = np.einsum("gdr,gde,ger->g", u, moment, u)
    total = np.trace(moment, axis1=-2, axis2=-1)
    return np.where(total > 0, 1 - inside / np.where(total > 0, total, 1), 0)


def overlap(u: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return Tr(U^T W W^T U) / R [G] of two bases [G, D, R]."""
    return ((u.swapaxes(-1, -2) @ w) ** 2).sum((-1, -2)) / u.shape[-1]
