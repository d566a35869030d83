"""THE SPEC of calibrated rotations (OSCAR, arXiv 2605.17757), in NumPy float64.

A rotation R = U H P per kv head: U the eigenvectors of a target that weights directions by how attention reads them, H
a Hadamard matrix, P a bit-reversal permutation. Rules as in `affine.py`.

Row vectors throughout: stored = x @ R, x = stored @ R^T. `B` batch, `H` query heads, `G` kv heads,
`T` tokens, `L` queries, `D` head dim. Targets are means over rows: a factor changes no eigenvector.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec import affine

# --------------------------------------------------------------------------------------------------
# Targets, [G, D, D].


def own_target(x: np.ndarray) -> np.ndarray:
    """Return K^T K / T or V^T V / T of x [B, G, T, D]: the ablation that sees the cache alone."""
    rows = x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1])
    return rows.swapaxes(-1, -2) @ rows / rows.shape[1]


def key_target(q: np.ndarray, kv_heads: int) -> np.ndarray:
    """Return Sigma_K = Q_g^T Q_g over the rows of all query heads of the kv head's group (section 3, eq.
    1). q: [B, H, L, D], after RoPE."""
    batch, heads, new, dims = q.shape
    return own_target(q.reshape(batch, kv_heads, heads // kv_heads * new, dims))


def value_target(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return C_S, the sum over the group's query heads of V^T S^T S V, S the softmax scores [L, T] (section
    3, eq. 2). Arguments as in `affine.attention`."""
    heads, kv_heads = q.shape[1], k.shape[1]
    out = np.zeros((kv_heads, v.shape[-1], v.shape[-1]))
    eye = np.broadcast_to(np.eye(k.shape[2]), (len(k), kv_heads, k.shape[2], k.shape[2]))
    scores = affine.attention(q, k, eye, scale, mask, sinks)  # values of I give S itself
    for h in range(heads):
        g = h * kv_heads // heads
        for s, values in zip(scores[:, h], v[:, g], strict=True):
            out[g] += values.T @ (s.T @ s) @ values
    return out * kv_heads / (heads * len(q) * q.shape[2])


def released_value_target(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return V^T diag(w) V [G, D, D], w_t = k_t (Q^T Q) k_t^T over its sum: the value target of the released code in
    place of eq. 2 (rotation/compute_kv_rotation.py, `compute_sst`). Arguments as in `value_target`."""
    read = key_target(q, k.shape[1])
    rows = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1]) for x in (k, v))
    keys, values = rows
    weights = np.einsum("gtd,gde,gte->gt", keys, read, keys)
    weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-12)
    return (values * weights[..., None]).swapaxes(-1, -2) @ values


def frozen_error(target: np.ndarray, basis: np.ndarray, variances: np.ndarray) -> float:
    """Return tr(R^T Sigma R E), E = diag(variances [D]): the surrogate of section 3, the error of scores (or outputs)
    if the error of the codes did not depend on the rotation. Among orthogonal R, eigenvectors against ordered
    variances minimise it (theorem 1, A.6)."""
    return float(np.trace(basis.T @ target @ basis @ np.diag(variances)))


# --------------------------------------------------------------------------------------------------
# The four levels of its newer results.

CUT = 0.9810652732849121  # boundary of the Lloyd-Max code of a standard normal, as released
OUTER, STRETCH = (
    1.5095585584640503,
    1.16,
)  # its outer centroid; what the release multiplies evenly spaced levels by
CENTROIDS = np.array([-1.51041761, -0.45278004, 0.45278004, 1.51041761])  # Max 1960, table 1


def four_levels(x: np.ndarray, exact: bool = False) -> np.ndarray:
    """Code each row of x [..., R] by Lloyd-Max's boundaries of a standard normal and decode it: [..., R].

    Rows lose their mean and are divided by their standard deviation; levels are evenly spaced, as released
    (oscar_rotation_clip_int2_kv.py), or for `exact` the centroids."""
    mean = x.mean(-1, keepdims=True)
    std = np.sqrt(x.var(-1, keepdims=True) + 1e-8)
    z = (x - mean) / std
    codes = (z[..., None] >= np.array([-CUT, 0.0, CUT])).sum(-1)
    levels = CENTROIDS if exact else (np.arange(4) - 1.5) * (2 * OUTER / 3) * STRETCH
    return levels[codes] * std + mean


# --------------------------------------------------------------------------------------------------
# The rotation of one head.


def eigenbasis(target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues [D], ascending, and U [D, D], a vector per column, of a target [D, D], symmetrised.

    An eigenvector has no sign of its own: its entry of largest magnitude is made positive.
    """
    values, vectors = np.linalg.eigh((target + target.T) / 2)
    top = np.abs(vectors).argmax(0)
    return values, vectors * np.sign(vectors[top, np.arange(len(top))])


def sylvester(dims: int) -> np.ndarray:
    """Return the Hadamard matrix [D, D] of section 3 and appendix A.1, without random signs."""
    return affine.hadamard(dims) * affine.signs(dims, 0)[:, None]


def bit_reversal(dims: int) -> np.ndarray:
    """Return [D] positions: column j of (A P) is column D - 1 - bitrev(j) of A, for ascending eigenvalues
    (rotation/compute_kv_rotation.py: perm[bitrev(i)] = argsort descending [i])."""
    width = dims.bit_length() - 1
    reverse = [int(f"{j:0{width}b}"[::-1], 2) if width else 0 for j in range(dims)]
    return dims - 1 - np.array(reverse)


def waves(dims: int) -> np.ndarray:
    """Return [D, D], D odd: row i is a real wave over D positions, slowest first: 1, cos, sin, cos 2, ..."""
    j = np.arange(dims)
    rows = [np.full(dims, 1 / np.sqrt(dims))]
    for k in range(1, (dims + 1) // 2):
        rows += [np.sqrt(2 / dims) * f(2 * np.pi * j * k / dims) for f in (np.cos, np.sin)]
    return np.array(rows)


def mixing(dims: int, spread: bool = True) -> np.ndarray:
    """Return H P [D, D], or its counterpart for other even D. Without `spread`: H alone, or SRFT.

    Row i of H P is the Walsh function of the i-th fewest sign changes, but for pairs (Paley's order).
    The directions that attention reads least come first, so an outlier that calibration finds there is
    constant over a whole group and goes into the group's bias. An SRFT spreads as evenly but has no such
    order. So for D = a b, a a power of two and b odd: blocks of a dims, Walsh functions inside a block,
    real Fourier waves over the b blocks, slowest first; row i_h b + i_l is wave i_l times Walsh function
    i_h. b = 1 is H P.
    """
    a = dims & -dims
    if not spread:
        return sylvester(dims) if a == dims else affine.srft(np.eye(dims))
    walsh = sylvester(a)[:, bit_reversal(a)]
    rows: list[np.ndarray] = [
        np.kron(wave, function) for function in walsh for wave in waves(dims // a)
    ]
    return np.array(rows)


def rotation(target: np.ndarray, parts: str = "uhp") -> np.ndarray:
    """Return R [D, D] from a target [D, D]. parts: the factors U, H, P to use; P only with H."""
    basis = eigenbasis(target)[1] if "u" in parts else np.eye(len(target))
    return basis @ mixing(len(target), "p" in parts) if "h" in parts else basis
