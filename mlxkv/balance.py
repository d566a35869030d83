"""Balanced transforms: per kv head an invertible pair (down, up), not orthogonal.

As in balanced truncation (Moore 1981): under `down` what is stored and what reads it have the same
diagonal second moment, so that noise times sensitivity is least over all invertible maps. NumPy
float64; spec: `reference_balanced`. Letters: `G` kv heads, `D` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxkv import rotation

SHRINK = 1e-3  # of a moment that its diagonal takes: what a short text cannot tell, and full rank
DEAD = 1e-8  # of the largest variance of a channel: those below are raised to it
FLOOR = 1e-4  # of the largest sigma: directions below are stored as if they had as much
PRECISE = 1e-3  # largest entry of |down @ up - I| in a sound float32 pair
CONDITION = 1e6  # largest singular value of a sound `down` over its smallest


@dataclass(frozen=True, eq=False)
class Balance:
    """Of one side of a layer: down [G, D, D] float32 (stored = x @ down, before any mixing), a
    direction per column by falling sigma [G, D] float32; G is 1 where all kv heads share one.
    floored: directions that the text said nothing about."""

    down: np.ndarray
    sigma: np.ndarray
    floored: int = 0

    @property
    def condition(self) -> float:
        """Largest over smallest singular value of `down`, the worst kv head."""
        return float(np.linalg.cond(self.down.astype(np.float64)).max())

    def pair(self, parts: str) -> tuple[np.ndarray, np.ndarray]:
        """(down, up), each [G, D, D] float32: stored = x @ down, x = stored @ up."""
        return tuple(x.astype(np.float32) for x in mixed(self.down.astype(np.float64), parts))


def balance(noise: np.ndarray, sensitivity: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(down [G, D, D], sigma [G, D], falling; directions without a say) of second moments [G, D, D]:
    of what is stored, and of what reads it."""
    noise, blank = shrunk(noise)
    sensitivity, deaf = shrunk(sensitivity)
    lower = np.linalg.cholesky(noise)
    squares, turn = np.linalg.eigh(lower.swapaxes(-1, -2) @ sensitivity @ lower)
    sigma = np.sqrt(np.maximum(squares, 0))[:, ::-1]
    sigma = np.maximum(sigma, sigma[:, :1] * FLOOR)
    down = np.linalg.solve(lower.swapaxes(-1, -2), turn[..., ::-1]) * np.sqrt(sigma)[:, None]
    top = np.abs(down).argmax(-2)[:, None]
    return down * np.sign(np.take_along_axis(down, top, -2)), sigma, blank + deaf


def shrunk(moment: np.ndarray) -> tuple[np.ndarray, int]:
    """A second moment [G, D, D] of full rank, and how many directions it lacked.

    Towards its diagonal, not towards the identity: outlier channels stay what they are.
    """
    moment = (moment + moment.swapaxes(-1, -2)) / 2
    diagonal = np.diagonal(moment, axis1=-2, axis2=-1)
    least = np.maximum(diagonal.max(-1, keepdims=True) * DEAD, np.finfo(np.float32).tiny)
    whole = np.maximum(diagonal, least)
    size, eye = np.sqrt(whole), np.eye(moment.shape[-1])
    correlation = moment / (size[:, None] * size[..., None])
    resolution = 8 * np.finfo(np.float32).eps * moment.shape[-1]  # moments are summed in float32
    lacking = int((np.linalg.eigvalsh(correlation) < resolution).sum())
    raised = moment + eye * (whole - diagonal)[:, None]
    return (1 - SHRINK) * raised + SHRINK * eye * whole[:, None], lacking


def mixed(down: np.ndarray, parts: str) -> tuple[np.ndarray, np.ndarray]:
    """(down M, M^T down^-1) of [G, D, D], M the mixing of `rotation.compose`: its H and P as far as
    `parts` say; without "u" M alone."""
    dims = down.shape[-1]
    mix = rotation.compose(np.eye(dims)[None], parts.replace("u", ""))
    if "u" not in parts:
        down = np.broadcast_to(np.eye(dims), down.shape)
    return down @ mix, mix.swapaxes(-1, -2) @ np.linalg.inv(down)


def fault(down: np.ndarray) -> str | None:
    """What makes a pair [G, D, D] useless, or None."""
    x = down.astype(np.float64)
    condition = float(np.linalg.cond(x).max())
    if not condition <= CONDITION:
        return f"a condition of {condition:.2g}"
    there, back = (y.astype(np.float32).astype(np.float64) for y in mixed(x, rotation.PARTS))
    off = float(np.abs(there @ back - np.eye(x.shape[-1])).max())
    return None if off <= PRECISE else f"an inverse off by {off:.2g}"
