"""Golden tensors of the methods of `cases.METHODS`: words, numbers, decoded values and products; and the bits and maps
that moments lead to. All are small, to keep the files small."""

from functools import partial
from importlib import import_module

import numpy as np

from golden.affine import MARGIN, half_near, inputs
from mlxkv.spec import affine as ref
from mlxkv.spec import balanced, bounds, cases
from mlxkv.spec import mixed_bits as mixed_bits_ref
from mlxkv.spec import polar as polar_ref

PAGE = 32
DECODED = 32  # one token in so many is kept as decoded values; scores and mixtures read all


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
    """Keys whose pairs are rotated as by RoPE: some angles fill the circle, some do not."""
    out = {}
    for key, spec in cases.METHODS["polar"].quantizers.items():
        dims, radius, angle = int(key.split(".")[0]), spec.radius, spec.angle
        given = _given(rng, _rotated(inputs(rng, 1, 1, PAGE, dims)))
        out |= {f"{dims}.{name}": y for name, y in given.items()}
        x = given["x"].astype(np.float64)
        stored = polar_ref.encode(x, radius, angle)
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


def _rotated(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-np.arange(half) / half)
    phase = np.exp(1j * np.arange(x.shape[-2])[:, None] * frequency)
    y = (x[..., :half] + 1j * x[..., half:]) * phase
    return np.concatenate([y.real, y.imag], -1)


def _step_near(x: np.ndarray, bits: int) -> np.ndarray:
    """Mark where a float32 backend may be one step off."""
    _, step, low = polar_ref._steps(x, bits)
    value = (x - low) / np.where(step > 0, step, 1.0)
    edge = np.abs(value - np.rint(value)) < MARGIN * 2**bits
    width = (x.max(-2, keepdims=True) - low) / 2**bits
    return edge | half_near(x.min(-2, keepdims=True)) | half_near(width)


MIXED_DIMS, TOKENS = 48, 16
MAPS = ((64, 1, 2.25), (48, 2, 3.0), (32, 3, 2.5))  # head dim, layers, bits a value


def fill(rng) -> dict:
    """Stored dims whose size fits some widths and not others; tokens differ, too."""
    x = inputs(rng, 1, 1, TOKENS, MIXED_DIMS).astype(np.float16)
    q, p = rng.standard_normal((1, 1, 1, MIXED_DIMS)), rng.random((1, 1, 1, TOKENS))
    q, p = q.astype(np.float16), p.astype(np.float16)
    out = {f"{MIXED_DIMS}.{name}": y for name, y in (("x", x), ("q", q), ("p", p))}
    x = x.astype(np.float64)
    for key, spec in cases.METHODS["fill"].quantizers.items():
        widths = spec.widths
        codes, scale = mixed_bits_ref.encode(x, widths)
        out[f"{key}.widths"] = np.array(widths, np.uint8)
        out[f"{key}.codes"] = ref.pack(codes, np.repeat(widths, mixed_bits_ref.DIMS))
        out[f"{key}.scale"] = scale.astype(np.float16)
        _, gains, top = mixed_bits_ref.tables(widths)
        value = x * gains / np.where(scale > 0, scale, 1.0) + top / 2
        edge = np.abs(value - np.floor(value) - 0.5) < MARGIN * 256
        out[f"{key}.near"] = _near(edge | half_near(mixed_bits_ref.scale(x, widths)))
        decoded = mixed_bits_ref.decode(codes, scale, widths)
        out |= {f"{key}.{name}": y for name, y in _products(q, p, decoded).items()}
    return out


def fill_maps(rng) -> dict:
    """The widths that a rate leads to for the moments of the keys and values of some layers, and some numbers of the
    maps of both sides (`bounds.mixed_bits`)."""
    out = {}
    for number, (dims, layers, rate) in enumerate(MAPS):
        regular, sigma = {}, []
        for side in range(2 * layers):
            both = bounds.mixed_bits_moments(dims, 100 * number + side)
            regular[side] = [[balanced.regular(x) for x in one] for one in zip(*both, strict=True)]
            sigma.append(np.stack([balanced.balanced(*one)[1] for one in regular[side]]))
        found = mixed_bits_ref.allotted(list(zip(sigma[::2], sigma[1::2], strict=True)), rate)
        out[f"{number}.asked"] = np.array([dims, layers, rate], np.float64)
        for side, widths in enumerate(one for both in found for one in both):
            out[f"{number}.{side}.widths"] = np.array(widths, np.uint8)
            maps = zip(*(mixed_bits_ref.pair(*one, widths) for one in regular[side]), strict=True)
            out[f"{number}.{side}.some"] = bounds.mixed_bits_sample(*map(np.stack, maps))
    return out


def method(name: str, rng: np.random.Generator) -> dict:
    """Make the cases of a method by `encode`, `near` and `decode` of its spec."""
    out, spec = {}, import_module(f"mlxkv.spec.{name}")
    for key, quantizer in cases.METHODS[name].quantizers.items():
        dims = int(key.split(".")[0])
        if f"{dims}.x" not in out:
            given = _given(rng, inputs(rng, 1, 1, PAGE, dims))
            out |= {f"{dims}.{given_name}": y for given_name, y in given.items()}
        x = out[f"{dims}.x"].astype(np.float64)
        stored = spec.encode(x, quantizer)
        made = {n: y.astype(np.float16) for n, y in stored.items() if n != "codes"}
        made["codes"] = ref.pack(stored["codes"], quantizer.code_bits)
        made["near"] = _near(spec.near(x, quantizer))
        decoded = spec.decode(stored, quantizer)
        made |= _products(out[f"{dims}.q"], out[f"{dims}.p"], decoded)
        # Files take arrays as they lie in memory.
        out |= {f"{key}.{n}": np.ascontiguousarray(y) for n, y in made.items()}
    return out


MAKERS = {"polar": polar, "fill": fill}  # of those that pack codes in another way
TABLES = {  # name: seed, maker, what the header says beside version and seed
    **{
        name: (of.seed, MAKERS.get(name, partial(method, name)), {"seed": str(of.seed)})
        for name, of in cases.METHODS.items()
    },
    "fill_maps": (20274, fill_maps, {"seed": "20274"}),
}
