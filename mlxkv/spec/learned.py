"""THE SPEC of learned transforms, in NumPy float64. Rules as in `affine.py`.

SRFT paper (arXiv 2605.05699), section 5: after the fixed sign-randomised FFT Q come a learned rotation R
and a learned scale per coordinate, stored = x Q R diag(scale), x = stored diag(1 / scale) R^T Q^T. Q
may be left out (section 5.3). Row vectors; `D` head dim, `K` reflectors.

Where the paper is silent: scales are exponentials, so positive, with a geometric mean of 1 (codes ignore
a common factor), clamped to 1/LARGEST .. LARGEST; K = D/2, rounded up to an even number, so that reflectors
can start in equal pairs, which cancel.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec import affine as ref

LARGEST = 1024.0


def exponential(free: np.ndarray) -> np.ndarray:
    """Return R = exp(A), A = L - L^T with L the strict lower triangle of free [D, D] (section 5.1: "an exact
    Lie-algebra map onto SO(d)"). i A is Hermitian: its eigenvectors give the exponential."""
    lower = np.tril(free, -1)
    values, vectors = np.linalg.eigh(1j * (lower - lower.T))
    return np.real((vectors * np.exp(-1j * values)) @ vectors.conj().T)


def householder(vectors: np.ndarray) -> np.ndarray:
    """Return R = H_1 H_2 .. H_K, H = I - 2 v^T v / (v v^T), of vectors [K, D] of any length but 0 (Table 3,
    "Householder (k = d/2)")."""
    out = np.eye(vectors.shape[1])
    for v in vectors:
        out = out - 2 * np.outer(out @ v, v) / (v @ v)
    return out


def reflectors(dims: int) -> int:
    """Return K."""
    return 2 * -(-dims // 4)


def scale(free: np.ndarray) -> np.ndarray:
    """Return lambda [D] of free [D]."""
    bound = np.log(LARGEST)
    return np.exp(np.clip(free - free.mean(), -bound, bound))


def pair(base: str, rotation: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (down, up), each [D, D], of R [D, D] and lambda [D]. base: "srft" (seed 0) or "none"."""
    dims = len(scales)
    basis = (ref.transform("srft", dims, 0)[0] if base == "srft" else np.eye(dims)) @ rotation
    return basis * scales, basis.T / scales[:, None]


def loss(x: np.ndarray, down: np.ndarray, up: np.ndarray, bits: int, group: int) -> float:
    """Return the loss that Adam minimises: |x^ - x|^2 / |x|^2 over rows x [N, D], x^ decoded from min-max codes
    whose scales and biases are not rounded."""
    stored = x @ down
    decoded = np.empty_like(stored)
    for i in range(0, stored.shape[1], group):
        part = stored[:, i : i + group]
        low = part.min(-1, keepdims=True)
        step = (part.max(-1, keepdims=True) - low) / (2**bits - 1)
        step = np.where(step > 0, step, 1.0)
        decoded[:, i : i + group] = np.round((part - low) / step) * step + low
    return float(((decoded @ up - x) ** 2).sum() / (x**2).sum())
