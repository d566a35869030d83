"""THE SPEC of calibrated rotations (OSCAR, arXiv 2605.17757), in NumPy float64.

A rotation R = U H P per kv head: U the eigenvectors of a target that says which directions
attention reads, H a Hadamard matrix, P a bit-reversal permutation. Same rules as `reference.py`.

Row vectors throughout: stored = x @ R, x = stored @ R^T. `B` batch, `H` query heads, `G` kv heads,
`T` tokens, `L` queries, `D` head dim. Targets are means over rows: a factor changes no eigenvector.
"""

from __future__ import annotations

import numpy as np

from mlxkv import reference

# --------------------------------------------------------------------------------------------------
# Targets, [G, D, D].


def own_target(x: np.ndarray) -> np.ndarray:
    """K^T K / T or V^T V / T of x: [B, G, T, D], the ablation that looks at the cache alone."""
    rows = x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1])
    return rows.swapaxes(-1, -2) @ rows / rows.shape[1]


def key_target(q: np.ndarray, kv_heads: int) -> np.ndarray:
    """Sigma_K = Q_g^T Q_g over the rows of all query heads of the kv head's group (section 3, eq.
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
    """C_S = sum over the group's query heads of V^T S^T S V, S the softmax scores [L, T] (section
    3, eq. 2). Arguments as in `reference.attention`."""
    heads, kv_heads = q.shape[1], k.shape[1]
    out = np.zeros((kv_heads, v.shape[-1], v.shape[-1]))
    eye = np.broadcast_to(np.eye(k.shape[2]), (len(k), kv_heads, k.shape[2], k.shape[2]))
    scores = reference.attention(q, k, eye, scale, mask, sinks)  # values of I give S itself
    for h in range(heads):
        g = h * kv_heads // heads
        for s, values in zip(scores[:, h], v[:, g], strict=True):
            out[g] += values.T @ (s.T @ s) @ values
    return out * kv_heads / (heads * len(q) * q.shape[2])


def value_surrogate(k: np.ndarray, v: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """V^T diag(w) V / T with w_t = k_t Sigma_K k_t^T, its mean 1: what the released code takes for
    C_S (rotation/compute_kv_rotation.py, "sst"). k, v: [B, G, T, D], sigma: [G, D, D]."""
    w = np.einsum("bgti,gij,bgtj->bgt", k, sigma, k)
    w = w / w.mean(axis=(0, 2), keepdims=True)
    return own_target(v * np.sqrt(w)[..., None])


# --------------------------------------------------------------------------------------------------
# The rotation of one head.


def eigenbasis(target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(eigenvalues [D], ascending; U [D, D], a vector per column) of a target [D, D], symmetrised.

    An eigenvector has no sign of its own: its entry of largest magnitude is made positive.
    """
    values, vectors = np.linalg.eigh((target + target.T) / 2)
    top = np.abs(vectors).argmax(0)
    return values, vectors * np.sign(vectors[top, np.arange(len(top))])


def sylvester(dims: int) -> np.ndarray:
    """The Hadamard matrix of section 3 and appendix A.1, [D, D]: no random signs."""
    return reference.hadamard(dims) * reference.signs(dims, 0)[:, None]


def bit_reversal(dims: int) -> np.ndarray:
    """[D] positions: column j of (A P) is column D - 1 - bitrev(j) of A, for ascending eigenvalues
    (rotation/compute_kv_rotation.py: perm[bitrev(i)] = argsort descending [i])."""
    width = dims.bit_length() - 1
    reverse = [int(f"{j:0{width}b}"[::-1], 2) if width else 0 for j in range(dims)]
    return dims - 1 - np.array(reverse)


def phases(eigenvalues: np.ndarray) -> np.ndarray:
    """[D/2 - 1] angles that turn the bins of an SRFT, in place of P where D is no power of two.

    A real bin (cos, -sin) carries 2 tr / D of the target for any U: groups of whole bins are
    balanced already. Inside a bin the two differ by Re z, z = sum_i lambda_i exp(-4 pi i k / D)
    (i as an index and the unit). Multiplying the complex bin by exp(i phi) multiplies z by
    exp(2 i phi): phi = (pi/2 - arg z) / 2 makes the diagonal of R^T Sigma R as flat as Hadamard's.
    """
    dims = len(eigenvalues)
    z = np.fft.fft(eigenvalues)[2 * np.arange(1, dims // 2)]  # bins 2 .. D - 2
    turned = (np.pi / 2 - np.angle(z)) / 2
    return np.where(np.abs(z) > 1e-9 * np.abs(eigenvalues).sum(), turned, 0.0)


def mixing(dims: int, eigenvalues: np.ndarray, spread: bool = True) -> np.ndarray:
    """H P, or for other even dims the SRFT of `reference.srft` (seed 0) with turned bins; without
    `spread` H alone, or the plain SRFT."""
    if dims & (dims - 1) == 0:
        h = sylvester(dims)
        return h[:, bit_reversal(dims)] if spread else h
    out = reference.srft(np.eye(dims))
    if spread:
        angle = phases(eigenvalues)
        re, im = out[:, 2::2].copy(), out[:, 3::2].copy()
        out[:, 2::2] = re * np.cos(angle) - im * np.sin(angle)
        out[:, 3::2] = re * np.sin(angle) + im * np.cos(angle)
    return out


def rotation(target: np.ndarray, parts: str = "uhp") -> np.ndarray:
    """R [D, D] from a target [D, D]. parts: those of U, H, P that are used; P goes with H."""
    values, vectors = eigenbasis(target)
    if "u" not in parts:
        values, vectors = np.ones(len(target)), np.eye(len(target))
    return vectors @ mixing(len(target), values, "p" in parts) if "h" in parts else vectors


def frozen_error(target: np.ndarray, basis: np.ndarray, variances: np.ndarray) -> float:
    """tr(R^T Sigma R E), E = diag(variances [D]): the surrogate of section 3, the error of logits
    (or outputs) if that of the codes did not depend on the rotation."""
    return float(np.trace(basis.T @ target @ basis @ np.diag(variances)))
