"""Bases of low rank from a calibration, and how well a basis fits. NumPy float64; spec: `reference_oja`.

Nothing is stored for them: a calibration has the second moment of queries in its eigenvectors, and that
of keys (values) in its balanced transform, which makes it diagonal. Letters: `G` kv heads, `D` head dim,
`R` stored dims.
"""

from __future__ import annotations

import numpy as np

from mlxkv import rotation
from mlxkv.balance import SHRINK, Balance


def stored_moment(found: Balance) -> np.ndarray:
    """[G, D, D] of what caches were handed: under `down` it is diag(sigma), after `balance.shrunk`."""
    up = np.linalg.inv(found.down.astype(np.float64))
    moment = up.swapaxes(-1, -2) @ (found.sigma.astype(np.float64)[..., None] * up)
    diagonal = np.diagonal(moment, axis1=-2, axis2=-1)[:, None]
    return (moment - SHRINK * np.eye(moment.shape[-1]) * diagonal) / (1 - SHRINK)


def read_moment(values: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """[G, D, D] of eigenvalues [G, D] and vectors [G, D, D]."""
    vectors = vectors.astype(np.float64)
    return (vectors * values[:, None].astype(np.float64)) @ vectors.swapaxes(-1, -2)


def basis(moment: np.ndarray, rank: int, mixed: bool = False) -> np.ndarray:
    """[G, D, R], the leading directions; mixed: by a sign-randomised Fourier transform of R dims."""
    _, vectors, _ = rotation.eigenbasis(moment)
    leading = vectors[..., ::-1][..., :rank]
    return (
        leading @ (rotation.signs(rank, 0)[:, None] * rotation.fourier(rank)) if mixed else leading
    )


def ranks(moment: np.ndarray, energy: float) -> np.ndarray:
    """[G]: the fewest directions with that share of the energy."""
    values = np.maximum(np.linalg.eigvalsh(moment)[..., ::-1], 0)
    share = np.cumsum(values, -1) / values.sum(-1, keepdims=True)
    return (share < energy - 1e-12).sum(-1) + 1


def residual(moment: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Residual-energy ratio of rows with this second moment [G, D, D], per kv head: [G]."""
    inside = np.einsum("gdr,gde,ger->g", u, moment, u)
    return 1 - inside / np.trace(moment, axis1=-2, axis2=-1)


def overlap(u: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Tr(U^T W W^T U) / R, per kv head: [G]."""
    return ((u.swapaxes(-1, -2) @ w) ** 2).sum((-1, -2)) / u.shape[-1]
