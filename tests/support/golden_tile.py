"""Golden tensors of the formats whose scales belong to a tile: KVarN, PolarQuant.

The tiles are small to keep the files small.
"""

from __future__ import annotations

import numpy as np
from golden_affine import MARGIN, half_near, inputs

from mlxkv.spec import affine as ref
from mlxkv.spec import dual_scale as dual
from mlxkv.spec import polar as polar_ref
from mlxkv.spec.mixed import kitty as kitty_ref

PAGE = 32
DECODED = 32  # one token in so many is kept as decoded values; scores and mixtures read all
# dims: size of the values (the floor of the published scales holds the small ones); bits, axis,
# unit_std, quantile in thousandths
DUAL = {
    64: (0.02, [(2, "channel", 0, 0), (3, "token", 1, 0)]),
    80: (3.0, [(4, "channel", 1, 20), (2, "token", 0, 0)]),
}
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


def dual_scale(rng) -> dict:
    out = {}
    for dims, (size, cases) in DUAL.items():
        x = inputs(rng, 1, 1, PAGE, dims) @ dual.rotation(dims)
        x *= size * np.exp(0.7 * rng.standard_normal((1, 1, PAGE, 1)))  # tokens differ too
        given = _given(rng, x)
        out |= {f"{dims}.{name}": y for name, y in given.items()}
        x = given["x"].astype(np.float64)
        for bits, axis, unit, thousandths in cases:
            key, quantile = f"{dims}.{bits}.{axis}.{unit}.{thousandths}", thousandths / 1000
            codes, scale, bias, outer = dual.encode(x, bits, axis, bool(unit), quantile)
            exact = dual.balance(x, axis, bool(unit))[0 if axis == "channel" else 1]
            out[f"{key}.codes"] = ref.pack(codes, bits)
            out[f"{key}.exact"] = exact.astype(np.float32)
            for name, number in (("scale", scale), ("bias", bias), ("outer", outer)):
                out[f"{key}.{name}"] = number.astype(np.float16)
            out[f"{key}.near"] = _near(_dual_near(x / outer, bits, axis, quantile, scale, bias))
            decoded = dual.decode(codes, scale, bias, outer)
            for name, y in _products(given["q"], given["p"], decoded).items():
                out[f"{key}.{name}"] = y
    return out


def _dual_near(y, bits, axis, quantile, scale, bias) -> np.ndarray:
    """Mark where a float32 backend that knows the outer scales may be one code off."""
    over, top = -2 if axis == "channel" else -1, 2**bits - 1
    low, high = (np.quantile(y, n, over, keepdims=True) for n in (quantile, 1 - quantile))
    value = (y - bias) / np.where(scale > 0, scale, 1.0)
    edge = np.abs(value - np.floor(value) - 0.5) < MARGIN * 2**bits
    return edge | half_near(low) | half_near((high - bias) / top)


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


KITTY = {64: [125, 250], 80: [200]}  # dims: shares in thousandths


def kitty(rng) -> dict:
    """Keys whose channels differ in size, in two sets of 2 bits."""
    out = {}
    for dims, shares in KITTY.items():
        given = _given(rng, inputs(rng, 1, 1, PAGE, dims))
        out |= {f"{dims}.{name}": y for name, y in given.items()}
        x = given["x"].astype(np.float64)
        for thousandths in shares:
            key, share = f"{dims}.{thousandths}", thousandths / 1000
            codes, scale, bias, chosen = kitty_ref.encode(x, share)
            high, low = kitty_ref.split(codes, chosen)
            out[f"{key}.codes"], out[f"{key}.more"] = ref.pack(high, 2), ref.pack(low, 2)
            out[f"{key}.channels"] = ref.pack(chosen[..., None, :].astype(np.uint8), 1)
            for name, number in (("scale", scale), ("bias", bias)):
                out[f"{key}.{name}"] = number.astype(np.float16)
            value = (x - bias) / np.where(scale > 0, scale, 1.0)
            edge = np.abs(value - np.floor(value) - 0.5) < MARGIN * 16
            top = np.where(chosen, 15, 3)[..., None, :]
            low_near = half_near(x.min(-2, keepdims=True))
            out[f"{key}.near"] = _near(
                edge | low_near | half_near((x.max(-2, keepdims=True) - bias) / top)
            )
            decoded = kitty_ref.decode(codes, scale, bias)
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
    "dual_scale": (20270, dual_scale, {"seed": "20270"}),
    "polar": (20271, polar, {"seed": "20271"}),
    "kitty": (20272, kitty, {"seed": "20272"}),
}
