"""Whiten rows by a kernel, since MLX factorises on the CPU only.

Letters: `N` rows of `R` numbers. Plain-ops twins: `orthonormal`, and `mx.linalg.solve` in
`cache.adaptive.update`.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from mlxkv import errors
from mlxkv.formats.lowrank import RIDGE
from mlxkv.formats.matrices import off_orthonormal
from mlxkv.metal.launch import KernelBuilder, launch

SIMDGROUPS = 16
SHARED_BYTES = 31 << 10  # threadgroup memory for the triangle, out of 32 KiB
TINY = float(np.finfo(np.float32).tiny)
BOUND = 1e-5  # on the largest entry of U^T U - I, and on the difference from QR


def orthonormal(a: mx.array) -> mx.array:
    """Return Q of A = QR, A [..., D, R], with a positive diagonal of R."""
    q, r = mx.linalg.qr(a.astype(mx.float32), stream=mx.cpu)
    positive = mx.diagonal(r, axis1=-2, axis2=-1) >= 0
    return q * mx.where(positive, 1.0, -1.0)[..., None, :]


def why_not(dims: int, rank: int, builder: KernelBuilder | None) -> str | None:
    """Return why the kernel does not run for bases [dims, rank] here, or None.

    The first call for a size builds and tests the kernel.
    """
    if builder is None:
        return "no GPU here"
    if 4 * (rank * (rank + 1) // 2 + 2 * (rank + 31)) > SHARED_BYTES:
        return f"a triangle of {rank} dims does not fit in threadgroup memory"
    return _fault(dims, rank, builder)


def whiten(rows: mx.array, builder: KernelBuilder, ridge: float = 0.0) -> mx.array:
    """rows: [..., N, R] float32, N >= R unless there is a ridge -> B L^-T, the same shape, with
    L L^T = B^T B + ridge mean(diag) I; without a ridge twice, so that columns are orthonormal to a
    rounding: Q of a QR with a positive diagonal of R. With one [..., N + R, R]: L^-T stands behind."""
    *lead, count, rank = rows.shape
    sets, inverse = rows.size // (count * rank), int(ridge > 0)
    (out,) = launch(
        "whiten",
        [rows, _numbers(ridge)],
        {"N": count, "R": rank, "S": SIMDGROUPS, "INVERSE": inverse, "PASSES": 2 - inverse},
        (32 * SIMDGROUPS * sets, 1, 1),
        (32 * SIMDGROUPS, 1, 1),
        [((sets, count + rank * inverse, rank), mx.float32)],
        builder,
    )
    return out.reshape(*lead, count + rank * inverse, rank)


@cache
def _numbers(ridge: float) -> mx.array:
    return mx.array([ridge, TINY] + [0.0] * 6, mx.float32)


@cache
def _fault(dims: int, rank: int, builder: KernelBuilder) -> str | None:
    """Return why the kernel fails its test on this machine, or None."""
    rng = np.random.default_rng(0)
    bases = np.linalg.qr(rng.standard_normal((2, dims, rank)))[0]
    bases = mx.array((bases + 0.03 * rng.standard_normal(bases.shape)).astype(np.float32))
    try:
        whitened, with_inverse = whiten(bases, builder), whiten(bases, builder, RIDGE)
        mx.eval(whitened, with_inverse)
    except Exception as error:  # a compiler or driver may raise any exception
        return errors.reason(error)
    distances = [off_orthonormal(whitened), mx.abs(whitened - orthonormal(bases)).max().item()]
    worst = np.max([*distances, _off_inverse(bases, with_inverse)])  # NaN if any distance is NaN
    return None if worst <= BOUND else f"columns are off by {worst:.2g}"


def _off_inverse(bases: mx.array, with_inverse: mx.array) -> float:
    """Return the largest error of an entry of `whiten` with RIDGE, in float64."""
    x, rows, down = (
        np.array(y, np.float64) for y in (bases, *mx.split(with_inverse, [bases.shape[-2]], -2))
    )
    unit, moment = np.eye(x.shape[-1]), x.swapaxes(-1, -2) @ x
    moment += RIDGE * np.trace(moment, axis1=-2, axis2=-1)[:, None, None] / len(unit) * unit
    distances = (down.swapaxes(-1, -2) @ moment @ down - unit, rows - x @ down)
    return float(np.max([np.abs(y).max() for y in distances]))
