"""Balanced transforms: an invertible pair (down, up) per kv head, not orthogonal.

As in balanced truncation (Moore 1981), `down` gives what is stored and what reads it the same diagonal
second moment; noise times sensitivity is then least over all invertible maps. NumPy float64. Spec:
`mlxkv.spec.balanced`. Letters: `G` kv heads, `D` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxkv.formats import matrices

SHRINK = 1e-3  # share of a moment replaced by its diagonal: texts are short; gives full rank
DEAD = 1e-8  # least variance of a channel, as a share of the largest
FLOOR = 1e-4  # least sigma, as a share of the largest
PRECISE = 1e-3  # largest entry of |down @ up - I| in a sound float32 pair
ROUNDING = 1e-4  # of a second moment in a sound file, as a share of its largest entry
CONDITION = 1e6  # largest singular value of a sound `down` over its smallest


@dataclass(frozen=True, eq=False)
class Balance:
    """Invertible transform of one side of a layer.

    down: [G, D, D] float32, stored = x @ down before any mixing, a direction per column by falling sigma.
    sigma: [G, D] float32.
    floored: number of directions absent from the text.
    """

    down: np.ndarray
    sigma: np.ndarray
    floored: int = 0

    def pair(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (down, up), each [G, D, D] float32: stored = x @ down, x = stored @ up."""
        down = self.down.astype(np.float64)
        return self.down, np.linalg.inv(down).astype(np.float32)

    def mixed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the same with the directions mixed (`mixed`)."""
        down, up = mixed(self.down.astype(np.float64))
        return down.astype(np.float32), up.astype(np.float32)


def balance(noise: np.ndarray, sensitivity: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Balance two second moments [G, D, D]: noise, of the stored vectors; sensitivity, of their readers.

    Returns down [G, D, D], sigma [G, D], falling, and the number of directions that the moments lack.
    """
    noise, blank = shrunk(noise)
    sensitivity, deaf = shrunk(sensitivity)
    lower = np.linalg.cholesky(noise)
    squares, rotation = np.linalg.eigh(lower.swapaxes(-1, -2) @ sensitivity @ lower)
    sigma = np.sqrt(np.maximum(squares, 0))[:, ::-1]
    sigma = np.maximum(sigma, sigma[:, :1] * FLOOR)
    down = np.linalg.solve(lower.swapaxes(-1, -2), rotation[..., ::-1]) * np.sqrt(sigma)[:, None]
    top = np.abs(down).argmax(-2)[:, None]
    return down * np.sign(np.take_along_axis(down, top, -2)), sigma, blank + deaf


def about_mean(noise: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the covariance [G, D, D] of keys with this second moment, of the same shape, and this mean [G, D].

    Negative rounding errors are set to zero: a moment read from a file is rounded, and a mean may be far larger than
    the deviations.
    """
    outer = mean[:, :, None] * mean[:, None, :]
    size = np.sqrt(np.maximum(np.diagonal(noise, axis1=-2, axis2=-1), np.finfo(np.float32).tiny))
    correlation = (noise - outer) / (size[:, None] * size[..., None])
    values, vectors = np.linalg.eigh((correlation + correlation.swapaxes(-1, -2)) / 2)
    correlation = (vectors * np.maximum(values, 0)[:, None]) @ vectors.swapaxes(-1, -2)
    return correlation * (size[:, None] * size[..., None])


def shrunk(moment: np.ndarray) -> tuple[np.ndarray, int]:
    """Give a second moment [G, D, D] full rank; also return how many directions it lacked.

    It shrinks towards its diagonal, not towards the identity, which keeps outlier channels.
    """
    moment = (moment + moment.swapaxes(-1, -2)) / 2
    diagonal = np.diagonal(moment, axis1=-2, axis2=-1)
    # A head without any numbers has a floor by the others, so that what divides by its root stays small.
    least = max((diagonal.max() or 1.0) * DEAD**2, np.finfo(np.float32).tiny)
    floor = np.maximum(diagonal.max(-1, keepdims=True) * DEAD, least)
    raised_diagonal = np.maximum(diagonal, floor)
    size, eye = np.sqrt(raised_diagonal), np.eye(moment.shape[-1])
    correlation = moment / (size[:, None] * size[..., None])
    resolution = 8 * np.finfo(np.float32).eps * moment.shape[-1]  # moments are sums in float32
    lacking = int((np.linalg.eigvalsh(correlation) < resolution).sum())
    full = moment + eye * (raised_diagonal - diagonal)[:, None]
    return (1 - SHRINK) * full + SHRINK * eye * raised_diagonal[:, None], lacking


def mixed(down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (down M, M^T down^-1) of down [G, D, D], with M the factors H and P of `matrices.compose`."""
    mix = matrices.ordered(down.shape[-1])
    return down @ mix, mix.T @ np.linalg.inv(down)


def is_moment(x: np.ndarray) -> bool:
    """Return whether x [G, D, D] is symmetric and positive semidefinite, up to what float32 rounds, and not 0 in all
    heads."""
    largest = np.abs(x).max((-2, -1), keepdims=True).astype(np.float64)
    if not largest.any() or (np.abs(x - x.swapaxes(-1, -2)) > ROUNDING * largest).any():
        return False
    try:
        np.linalg.cholesky(x + np.where(largest > 0, ROUNDING * largest, 1) * np.eye(x.shape[-1]))
    except np.linalg.LinAlgError:
        return False
    return True


def fault(down: np.ndarray) -> str | None:
    """Return why a `down` [G, D, D] cannot be used, or None."""
    x = down.astype(np.float64)
    condition = float(np.linalg.cond(x).max())
    if not condition <= CONDITION:
        return f"a condition of {condition:.2g}"
    forward, inverse = (y.astype(np.float32).astype(np.float64) for y in mixed(x))
    off = float(np.abs(forward @ inverse - np.eye(x.shape[-1])).max())
    return None if off <= PRECISE else f"an inverse off by {off:.2g}"
