"""Make the transforms of a layer's side from its moments. Spec: `spec/oscar.py`, `spec/balanced.py`."""

from __future__ import annotations

import numpy as np

from mlxkv.errors import MachineError
from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance
from mlxkv.formats.calibration.artifact import Basis
from mlxkv.formats.calibration.balance import Balance
from mlxkv.models.calibration.moments import Moments

# What the bases are eigenvectors of: what attention reads (the paper), the same with the surrogate of
# the released code for values, the cache itself, and two that need no text.
TARGETS = ("attention", "surrogate", "tensor", "random", "none")
WITHOUT_TEXT = ("random", "none")


def basis(moments: Moments, side: str, where: str, per_layer: bool) -> Basis:
    heads = 1 if per_layer else moments.shape.heads
    dims = moments.shape.key_dim if side == "keys" else moments.shape.value_dim
    if moments.target in WITHOUT_TEXT or (moments.readers and side == "values"):
        if moments.target != "random":
            vectors = np.broadcast_to(np.eye(dims), (heads, dims, dims))
        else:
            vectors = matrices.random_basis(heads, dims, dims)
        vectors, ones = vectors.astype(np.float32), np.ones((heads, dims), np.float32)
        none = np.zeros((moments.shape.heads, dims), np.float32) if side == "keys" else None
        # Of moments I.
        return Basis(ones, vectors, balance=Balance(vectors, ones), peaks=ones, mean=none)
    mean = _mean(moments, side, where, per_layer)
    values, vectors, floored = matrices.eigenbasis(mean)
    return Basis(
        values.astype(np.float32),
        vectors.astype(np.float32),
        floored,
        balance=_balance(moments, side, where, per_layer, mean),
        peaks=_peaks(moments, side, where, per_layer),
        mean=_key_mean(moments, where) if side == "keys" else None,
    )


def _mean(moments: Moments, name: str, where: str, per_layer: bool) -> np.ndarray:
    """The second moment [G or 1, D, D] of a sum. Raises MachineError for NaN or infinity."""
    mean = moments.moment(name)
    _check_finite(mean, where)
    return mean.mean(0, keepdims=True) if per_layer else mean


def _peaks(moments: Moments, side: str, where: str, per_layer: bool) -> np.ndarray | None:
    """The peaks [G or 1, D] of a side; 1 for channels of zeros. None where windows ended in their first tokens.

    Raises MachineError for NaN or infinity."""
    found = moments.peaks.get(side)
    if found is None:
        return None
    _check_finite(found, where)
    found = found.max(0, keepdims=True) if per_layer else found
    return np.where(found > 0, found, 1.0).astype(np.float32)


def _key_mean(moments: Moments, where: str) -> np.ndarray | None:
    """The mean [G, D] of keys; None where windows ended in their first tokens. Raises MachineError."""
    mean = moments.key_mean()
    if mean is None:
        return None
    _check_finite(mean, where)
    return mean.astype(np.float32)


def _check_finite(x: np.ndarray, where: str) -> None:
    if not np.isfinite(x).all():
        raise MachineError(
            f"[calibrate] NaN or infinity in {where}; the model computes them on this text; try "
            "another --dtype, or other text"
        )


def _balance(
    moments: Moments, side: str, where: str, per_layer: bool, queries: np.ndarray
) -> Balance | None:
    """The balanced transform of a side, or None. queries: their second moment, used for keys."""
    if moments.target != "attention":
        return None
    noise = _mean(moments, f"stored {side}", where, per_layer)
    reads = queries
    if side == "values":
        output = moments.output
        reads = np.broadcast_to(np.eye(noise.shape[-1]), noise.shape) if output is None else output
        if per_layer:
            reads = reads.mean(0, keepdims=True)
    down, sigma, floored = balance.balance(noise, reads)
    if side == "values":  # the unit of errors is free: stored values keep their size
        size = np.trace(noise, axis1=-2, axis2=-1) / sigma.sum(-1)
        down, sigma = down * np.sqrt(size)[:, None, None], sigma * size[:, None]
    return Balance(down.astype(np.float32), sigma.astype(np.float32), floored)
