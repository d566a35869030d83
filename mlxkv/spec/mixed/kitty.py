"""THE SPEC of Kitty (arXiv 2511.18643): keys of 2 bits per channel of a page, and 4 for the channels of largest
size, in NumPy float64. Rules as in `affine.py`.

Letters: `T` tokens of a page, `R` dims.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec.affine import _half

BITS, BOOSTED = 2, 4


def boosted(x: np.ndarray, share: float) -> np.ndarray:
    """Return which channels of x [..., T, R] take 4 bits, [..., R]: the floor(share R + 1e-6) of largest mean
    |x| over the page (released code: magnitude-based selection, after RoPE); of equal ones the first."""
    size = np.abs(x).mean(-2)
    order = np.argsort(-size, axis=-1, kind="stable")
    out = np.zeros(size.shape, bool)
    np.put_along_axis(out, order[..., : int(share * x.shape[-1] + 1e-6)], True, axis=-1)
    return out


def encode(x: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Encode x [..., T, R], pages: min-max codes per channel.

    Returns codes (uint8 [..., T, R], up to 3, or 15 where boosted), scale and bias (float64 holding float16
    values, [..., 1, R]) and the boosted channels [..., R].
    """
    x, chosen = np.asarray(x, np.float64), boosted(x, share)
    top = np.where(chosen, 2**BOOSTED - 1, 2**BITS - 1)[..., None, :]
    bias = _half(x.min(-2, keepdims=True))
    scale = _half((x.max(-2, keepdims=True) - bias) / top)
    codes = np.clip(np.rint((x - bias) / np.where(scale > 0, scale, 1.0)), 0, top)
    return codes.astype(np.uint8), scale, bias, chosen


def decode(codes: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return scale * code + bias: [..., T, R]."""
    return codes * scale + bias


def split(codes: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split codes [..., T, R] into two sets of 2 bits (section on the layout of pages): of all channels, the
    high bits where boosted; and [..., T, N], the low bits of the N boosted channels, ascending."""
    where = np.broadcast_to(chosen[..., None, :], codes.shape)
    lead = codes.shape[:-1]
    return np.where(where, codes >> 2, codes), codes[where].reshape(*lead, -1) & 3
