"""Golden tensors of bits by direction: words and scales, and the bits and maps that moments lead to. Small, to keep
the files small."""

import numpy as np
from golden_affine import MARGIN, half_near, inputs
from golden_tile import _near, _products

from mlxkv.spec import affine, balanced, bounds
from mlxkv.spec import fill as ref

DIMS, PAGE = 48, 16
WIDTHS = (8, 4, 1), (3, 2, 2)  # the second: an odd number of half words
CASES = ((64, 1, 2.25), (48, 2, 3.0), (32, 3, 2.5))  # head dim, layers, bits a value


def fill(rng) -> dict:
    """Stored dims whose size fits some widths and not others; tokens differ, too."""
    x = inputs(rng, 1, 1, PAGE, DIMS).astype(np.float16)
    q, p = rng.standard_normal((1, 1, 1, DIMS)), rng.random((1, 1, 1, PAGE))
    q, p = q.astype(np.float16), p.astype(np.float16)
    out = {f"{DIMS}.{name}": y for name, y in (("x", x), ("q", q), ("p", p))}
    x = x.astype(np.float64)
    for number, widths in enumerate(WIDTHS):
        key, (codes, scale) = f"{DIMS}.{number}", ref.encode(x, widths)
        out[f"{key}.widths"] = np.array(widths, np.uint8)
        out[f"{key}.codes"] = affine.pack(codes, np.repeat(widths, ref.DIMS))
        out[f"{key}.scale"] = scale.astype(np.float16)
        _, gains, top = ref.tables(widths)
        value = x * gains / np.where(scale > 0, scale, 1.0) + top / 2
        edge = np.abs(value - np.floor(value) - 0.5) < MARGIN * 256
        out[f"{key}.near"] = _near(edge | half_near(ref.scale(x, widths)))
        decoded = ref.decode(codes, scale, widths)
        out |= {f"{key}.{name}": y for name, y in _products(q, p, decoded).items()}
    return out


def fill_maps(rng) -> dict:
    """The widths that a rate leads to for the moments of the keys and values of some layers, and some numbers of the
    maps of both sides (`bounds.filled`)."""
    out = {}
    for number, (dims, layers, rate) in enumerate(CASES):
        regular, sigma = {}, []
        for side in range(2 * layers):
            both = bounds.filled_moments(dims, 100 * number + side)
            regular[side] = [[balanced.regular(x) for x in one] for one in zip(*both, strict=True)]
            sigma.append(np.stack([balanced.balanced(*one)[1] for one in regular[side]]))
        found = ref.allotted(list(zip(sigma[::2], sigma[1::2], strict=True)), rate)
        out[f"{number}.asked"] = np.array([dims, layers, rate], np.float64)
        for side, widths in enumerate(one for both in found for one in both):
            out[f"{number}.{side}.widths"] = np.array(widths, np.uint8)
            maps = zip(*(ref.pair(*one, widths) for one in regular[side]), strict=True)
            out[f"{number}.{side}.some"] = bounds.filled_sample(*map(np.stack, maps))
    return out


TABLES = {  # name: seed, maker, what the header says beside version and seed
    "fill": (20273, fill, {"seed": "20273"}),
    "fill_maps": (20274, fill_maps, {"seed": "20274"}),
}
