"""THE SPEC of PolarQuant (Wu et al., arXiv 2502.00527), in NumPy float64: keys as radius and angle.

Written from the paper and its authors' code. Keys are taken after RoPE, which rotates dims i and i + R/2
together (the two halves of a head, not neighbours). Each such pair becomes a radius and an angle in
[0, 2 pi); both are cut into steps between their smallest and largest value over the tokens of a
page, per pair. A code is the index of the step (floor) and decodes to its middle.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec.affine import HALF_MAX, half


def to_polar(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return radius and angle, each [..., R/2], of x [..., R]; the angle of (0, 0) is 0."""
    a, b = np.split(np.asarray(x, np.float64), 2, -1)
    angle = np.arctan2(b, a)
    return np.hypot(a, b), np.where(angle < 0, angle + 2 * np.pi, angle)


def _steps(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, step and low of x [..., T, n]: 2^bits steps between minimum and maximum over tokens."""
    low = half(x.min(-2, keepdims=True), HALF_MAX)
    step = half(np.maximum(x.max(-2, keepdims=True) - low, 0.0) / 2**bits)
    codes = np.floor((x - low) / np.where(step > 0, step, 1.0))
    return np.clip(codes, 0, 2**bits - 1).astype(np.uint8), step, low


def encode(x: np.ndarray, radius: int, angle: int) -> dict[str, np.ndarray]:
    """Encode one page per leading index of x [..., T, R] into codes (uint8 [..., T, R/2], the radius above
    the angle) and radius_step, radius_low, angle_step, angle_low ([..., 1, R/2], float64 holding float16
    values)."""
    rho, phi = to_polar(x)
    rho, rho_step, rho_low = _steps(rho, radius)
    phi, phi_step, phi_low = _steps(phi, angle)
    return {
        "codes": (rho << angle) + phi,
        "radius_step": rho_step,
        "radius_low": rho_low,
        "angle_step": phi_step,
        "angle_low": phi_low,
    }


def decode(stored: dict[str, np.ndarray], angle: int) -> np.ndarray:
    """Return [..., T, R]: radius (cos, sin) at the middle of both steps."""
    rho = (stored["codes"] >> angle).astype(np.float64)
    phi = (stored["codes"] & (2**angle - 1)).astype(np.float64)
    rho = stored["radius_low"] + (rho + 0.5) * stored["radius_step"]
    phi = stored["angle_low"] + (phi + 0.5) * stored["angle_step"]
    return np.concatenate([rho * np.cos(phi), rho * np.sin(phi)], -1)


def scores(q: np.ndarray, stored: dict[str, np.ndarray], angle: int) -> np.ndarray:
    """Return q . x^ [..., N, T] of q [..., N, R] by look-up, as the paper's kernel: per pair a table of q
    (cos, sin) at every angle, gathered by the codes, times the radius."""
    a, b = np.split(q, 2, -1)  # [..., N, R/2]
    steps = np.arange(2**angle, dtype=np.float64)[:, None] + 0.5
    angles = stored["angle_low"] + steps * stored["angle_step"]  # [..., 2^angle, R/2]
    table = a[..., None, :] * np.cos(angles)[..., None, :, :]
    table = table + b[..., None, :] * np.sin(angles)[..., None, :, :]
    gathered = np.take_along_axis(table, (stored["codes"] & (2**angle - 1))[..., None, :, :], -2)
    rho = stored["radius_low"] + ((stored["codes"] >> angle) + 0.5) * stored["radius_step"]
    return (gathered * rho[..., None, :, :]).sum(-1)
