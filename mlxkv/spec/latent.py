"""THE SPEC of attention over latents (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token is cached as a latent c [R], from which every head makes its key and its value, and as one key k_pe [N]
with rotary positions, which all heads share. Letters as in `spec.affine`; `R` latent dims, `N` rotary dims,
`D` dims of a head without positions, `Dv` of its values.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec import affine


def rotary_scores(q_pe: np.ndarray, k_pe: np.ndarray, scale: float) -> np.ndarray:
    """Return the term that positions add to the scores, [B, H, L, T], of q_pe [B, H, L, N] and k_pe [B, 1, T, N]
    (eq. 17: the key of a head is [k^C; k^R], so a score is the sum of two products)."""
    return scale * (q_pe @ k_pe.swapaxes(-1, -2))


def expanded(
    q: np.ndarray,
    latents: np.ndarray,
    up_keys: np.ndarray,
    up_values: np.ndarray,
    scale: float,
    bias: np.ndarray,
) -> np.ndarray:
    """Return attention with keys and values made from latents, [B, H, L, Dv] (eq. 10, 11 and 18).

    q: [B, H, L, D], without positions. latents: [B, 1, T, R]. up_keys: W^UK of each head, [H, D, R]. up_values:
    W^UV, [H, Dv, R]. bias: `rotary_scores`, and the mask.
    """
    keys = latents @ up_keys.swapaxes(-1, -2)
    values = latents @ up_values.swapaxes(-1, -2)
    return affine.attention(q, keys, values, scale, bias)


def absorbed(
    q: np.ndarray,
    latents: np.ndarray,
    up_keys: np.ndarray,
    up_values: np.ndarray,
    scale: float,
    bias: np.ndarray,
) -> np.ndarray:
    """Return the same with W^UK in the queries and W^UV in the outputs (section 2.1.2): one latent is the key and
    the value of all heads, so what is stored of it is one record."""
    out = affine.attention(q @ up_keys, latents, latents, scale, bias)
    return out @ up_values.swapaxes(-1, -2)


def stored(latents: np.ndarray, side: dict, sink: int, pages: int, page: int) -> np.ndarray:
    """Return latents [B, 1, T, R] as attention sees them, as keys and as values: `affine.stored` of one record.
    The rotary keys stay exact."""
    return affine.stored(latents, side, sink, pages, page)


def value_weight(
    queries: np.ndarray, up_values: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return what reads a latent, as two second moments [R, R]: of the absorbed queries times scale, rows [M, R],
    and W^UV^T W^UV summed over heads.

    An error e of a latent changes a score by scale q . e and a value by W^UV e; their mean squares are e^T Q e and
    e^T V e with these matrices.
    """
    rows = scale * queries
    return rows.T @ rows / len(rows), (up_values.swapaxes(-1, -2) @ up_values).sum(0)
