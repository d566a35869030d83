"""Make random directions of unequal weight, as in models, for formats with bits per direction. No model.

The logarithms of a head's sigma (`formats.calibration.balance`) are normal, descending, and wider in some layers than
in others, so that layers are allotted different bits. Letters: `G` kv heads, `D` head dim.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlxkv.formats.calibration import mixed_bits
from mlxkv.formats.calibration.artifact import SIDES, Basis, Calibration, Layer
from mlxkv.formats.calibration.balance import Balance
from mlxkv.formats.config import CacheConfig

NARROW, WIDE = 0.5, 1.3  # standard deviation of log sigma in a layer
LOUD = 0.3  # of the mean of log sigma, from layer to layer
LAYERS = 8  # layers that share the bit budget without a model


def falling(heads: int, dims: int, seed: int) -> np.ndarray:
    """Return sigma of one side of a layer, [G, D] float64, descending."""
    rng = np.random.default_rng(seed)
    mean, width = LOUD * rng.standard_normal(), rng.uniform(NARROW, WIDE)
    return -np.sort(-np.exp(mean + width * rng.standard_normal((heads, dims))), axis=-1)


def spread(calibration: Calibration) -> Calibration:
    """Return `calibration`, of random rotations, with directions of unequal weight."""
    layers = {}
    for n, (name, layer) in enumerate(calibration.layers.items()):
        keys, values = (_weighted(getattr(layer, side), 2 * n + i) for i, side in enumerate(SIDES))
        layers[name] = Layer(layer.kv_heads, keys, values)
    return replace(calibration, layers=layers)


def _weighted(basis: Basis, seed: int) -> Basis:
    """Return a basis whose stored and reading second moments are equal, with the eigenvectors of `basis`."""
    heads, dims = basis.values.shape
    sigma = falling(heads, dims, seed).astype(np.float32)
    balance = Balance(np.ascontiguousarray(basis.vectors[..., ::-1]), sigma)
    return replace(basis, values=np.ascontiguousarray(sigma[:, ::-1]), balance=balance)


def allotted(config: CacheConfig, dims: int) -> CacheConfig:
    """Return `config` for heads of `dims`, with mixed bits, if any, allotted: those of one of LAYERS layers, chosen so
    that keys and values use about the requested bits."""
    mixed = {side: getattr(config, side) for side in SIDES if getattr(config, side).mixed_bits}
    rates = [side.quantizer.rate for side in mixed.values()]
    is_shared, sides = len(set(rates)) < len(rates), {}
    for names in [SIDES] if is_shared else [(side,) for side in mixed]:
        directions = [
            (side, falling(1, dims, 2 * n + SIDES.index(side)))
            for n in range(LAYERS)
            for side in names
        ]
        widths = mixed_bits.allot(directions, mixed[names[0]].quantizer.rate)
        layers = [widths[i : i + len(names)] for i in range(0, len(widths), len(names))]
        bits = [sum(map(sum, layer)) for layer in layers]
        middle = layers[int(np.abs(np.array(bits) - np.mean(bits)).argmin())]
        for side, widths in zip(names, middle, strict=True):
            old = mixed[side]
            sides[side] = replace(old, quantizer=replace(old.quantizer, widths=widths))
    return replace(config, **sides)
