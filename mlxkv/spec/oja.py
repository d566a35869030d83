"""THE SPEC of low rank that follows the text (OjaKV, arXiv 2509.21623) and of token selection
(SnapKV, arXiv 2404.14469), in NumPy float64. Rules as in `affine.py`.

A basis U [G, D, R] has orthonormal columns; stored = x @ U, x ~ stored @ U^T (row vectors: the
paper's x_t = U^T k_t is our k_t @ U). `w` queries of the observation window.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec import affine

RIDGE = 0.1  # share of the mean energy of a stored dim, for batches of few tokens

# --------------------------------------------------------------------------------------------------
# The first basis (A.2).


def stacked(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return [R^Q; R^K]^T [R^Q; R^K] from the second moments per row [G, D, D]: queries stacked on keys with
    equal weight. The paper writes n x 2d, which has no [D, R] basis."""
    return first + second


def basis(moment: np.ndarray, rank: int) -> np.ndarray:
    """Return [G, D, R]: right singular vectors of the rows, largest singular values first."""
    _, vectors = np.linalg.eigh(moment)
    return vectors[..., ::-1][..., :rank]


def ranks(moment: np.ndarray, energy: float) -> np.ndarray:
    """Return [G]: the smallest r with ||(R)_r||_F^2 / ||R||_F^2 >= energy. A layer takes their maximum."""
    values = np.maximum(np.linalg.eigvalsh(moment)[..., ::-1], 0)
    share = np.cumsum(values, -1) / values.sum(-1, keepdims=True)
    return (share < energy - 1e-12).sum(-1) + 1


# --------------------------------------------------------------------------------------------------
# How well a basis fits (section 4).


def residual(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the residual-energy ratio [G]: ||x - x U U^T||^2 / ||x||^2 of x [G, T, D]."""
    remainder = x - x @ u @ u.swapaxes(-1, -2)
    return (remainder**2).sum((-1, -2)) / (x**2).sum((-1, -2))


def overlap(u: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return SO(U, W) = Tr(U^T W W^T U) / r [G]."""
    return ((u.swapaxes(-1, -2) @ w) ** 2).sum((-1, -2)) / u.shape[-1]


# --------------------------------------------------------------------------------------------------
# Updates (Algorithm 1).


def orthonormal(a: np.ndarray) -> np.ndarray:
    """Return Q of the unique A = QR whose R has a positive diagonal."""
    q, r = np.linalg.qr(a)
    return q * np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)[..., None, :]


def update(u: np.ndarray, x: np.ndarray, rate: float, raw: bool = False) -> np.ndarray:
    """Update U by one batch x [G, N, D], lines 4 to 6 and 14 to 16: y = x U, then Orthonormalise(U + step).

    raw: the paper's step = rate (x - y U^T)^T y. It grows with N and with the square of the scale of
    x: keys of norm 10 erase the old basis in one batch.
    Otherwise step = rate (x - y U^T)^T y (y^T y + RIDGE tr(y^T y) / R I)^-1, which neither a factor of x nor
    a repetition of the batch changes. Without RIDGE and at rate 1 the columns span x^T x U: one step of
    subspace iteration on the moment of the batch. So `rate` is the share of such a step.
    """
    y = x @ u
    step = (x - y @ u.swapaxes(-1, -2)).swapaxes(-1, -2) @ y
    if not raw:
        step = step @ np.linalg.inv(_regular(y.swapaxes(-1, -2) @ y))
    return orthonormal(u + rate * step)


def update_by_token(u: np.ndarray, x: np.ndarray, rate: float) -> np.ndarray:
    """Return u [G, D, R] after rows x [G, N, D] one by one: y = U^T x, U + rate (x - U y) y^T (section 5.2), which is
    orthonormalised once, after the last. Before that U and y grow together, so a step grows with the cube of U: it
    leaves every range of numbers within a few rows of rate |x|^2 > 2."""
    for t in range(x.shape[1]):
        row = x[:, t, :, None]
        y = u.swapaxes(-1, -2) @ row
        u = u + rate * (row - u @ y) @ y.swapaxes(-1, -2)
    return u


def _regular(moment: np.ndarray) -> np.ndarray:
    size = moment.shape[-1]
    mean = np.trace(moment, axis1=-2, axis2=-1)[..., None, None] / size
    return moment + (RIDGE * mean + np.finfo(np.float32).tiny) * np.eye(size)


def importance(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Return softmax(q k^T scale) [B, H, w, T] of the last w queries q [B, H, w, D], the last of them at the
    last key of k [B, G, T, D] (section 5.2)."""
    new, total = q.shape[2], k.shape[2]
    eye = np.broadcast_to(np.eye(total), (*k.shape[:2], total, total))  # values of I give p itself
    return affine.attention(q, k, eye, scale, affine.causal_mask(new, total))


def salient(p: np.ndarray, count: int) -> np.ndarray:
    """Return [B, count] positions, ascending, of the largest s_t, the sum over heads and queries of p
    [B, H, w, T]."""
    return np.sort(np.argsort(-p.sum((1, 2)), axis=-1, kind="stable")[:, :count], axis=-1)


# --------------------------------------------------------------------------------------------------
# Tokens stored with U_old when the basis has become U_new. Algorithm 1 has no such step.


def transported(stored: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return stored U_old^T U_new: what U_new would store of the decoded token ("transport"). "segments" keeps
    U_old beside the token instead; "stay" decodes by U_new unchanged, as Algorithm 1 says."""
    return stored @ (old.swapaxes(-1, -2) @ new)


# --------------------------------------------------------------------------------------------------
# SnapKV.

POOL = 7  # tokens: neighbours of an important token are kept too


def votes(p: np.ndarray, kv_heads: int, pool: int = POOL) -> np.ndarray:
    """Return [B, G, T]: p [B, H, w, T] summed over the window and the query heads of a kv head, then the largest
    of `pool` neighbours (SnapKV, section 4; pooled by the maximum as in its code)."""
    batch, heads, _, total = p.shape
    s = p.sum(2).reshape(batch, kv_heads, heads // kv_heads, total).sum(2)
    padded = np.pad(s, [(0, 0), (0, 0), (pool // 2, pool // 2)], constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(padded, pool, axis=-1).max(-1)


def kept(votes: np.ndarray, count: int) -> np.ndarray:
    """Return [B, G, count] positions, ascending, of the largest votes [B, G, T] (ties: the earlier)."""
    order = np.argsort(-votes, axis=-1, kind="stable")[..., :count]
    return np.sort(order, axis=-1)
