"""Golden tensors of the formats whose scales belong to a tile: PolarQuant (Wu).

The tiles are small to keep the files small.
"""

import numpy as np
from golden_affine import MARGIN, half_near, inputs

from mlxkv.spec import affine as ref
from mlxkv.spec import polar as polar_ref

PAGE = 32
DECODED = 32  # one token in so many is kept as decoded values; scores and mixtures read all
POLAR = {64: [(4, 4)], 80: [(2, 4)]}  # dims: bits of radius and angle


def _near(where: np.ndarray) -> np.ndarray:
    """Return the flat positions that a mask marks: they are few."""
    return np.flatnonzero(where).astype(np.uint16)


def _products(q: np.ndarray, p: np.ndarray, x: np.ndarray) -> dict[str, np.ndarray]:
    """Return some tokens of decoded x [..., T, R], and its products with a query and with token weights."""
    return {
        "decoded": x[..., ::DECODED, :].astype(np.float32),
        "scores": (q.astype(np.float64) @ x.swapaxes(-1, -2)).astype(np.float32),
        "mix": (p.astype(np.float64) @ x).astype(np.float32),
    }


def _given(rng, x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the inputs of all cases of one head dim."""
    rows = (1, 1, 1)
    q, p = rng.standard_normal((*rows, x.shape[-1])), rng.random((*rows, PAGE))
    return {name: y.astype(np.float16) for name, y in (("x", x), ("q", q), ("p", p))}


def polar(rng) -> dict:
    """Keys whose pairs are turned as by RoPE: some angles fill the circle, some do not."""
    out = {}
    for dims, cases in POLAR.items():
        given = _given(rng, _turned(inputs(rng, 1, 1, PAGE, dims)))
        out |= {f"{dims}.{name}": y for name, y in given.items()}
        x = given["x"].astype(np.float64)
        for radius, angle in cases:
            key, stored = f"{dims}.{radius}.{angle}", polar_ref.encode(x, radius, angle)
            out[f"{key}.codes"] = ref.pack(stored["codes"], radius + angle)
            for name in ("radius_step", "radius_low", "angle_step", "angle_low"):
                out[f"{key}.{name}"] = stored[name].astype(np.float16)
            rho, phi = polar_ref.to_polar(x)
            out[f"{key}.near_radius"] = _near(_step_near(rho, radius))
            out[f"{key}.near_angle"] = _near(_step_near(phi, angle))
            decoded = polar_ref.decode(stored, angle)
            for name, y in _products(given["q"], given["p"], decoded).items():
                out[f"{key}.{name}"] = y
    return out


def _turned(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * np.arange(x.shape[-2])[:, None] * frequency)
    y = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([y.real, y.imag], -1)


def _step_near(x: np.ndarray, bits: int) -> np.ndarray:
    """Mark where a float32 backend may be one step off."""
    _, step, low = polar_ref._steps(x, bits)
    value = (x - low) / np.where(step > 0, step, 1.0)
    edge = np.abs(value - np.rint(value)) < MARGIN * 2**bits
    width = (x.max(-2, keepdims=True) - low) / 2**bits
    return edge | half_near(x.min(-2, keepdims=True)) | half_near(width)


TABLES = {  # name: seed, maker, what the header says beside version and seed
    "polar": (20271, polar, {"seed": "20271"})
}
