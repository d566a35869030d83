"""THE SPEC of KVarN (arXiv 2606.03458), in NumPy float64: tiles of even spread, then min-max codes. Rules as in
`affine.py`.

A tile [T, R] is 128 tokens of one kv head behind a Hadamard rotation. Its tokens and channels are divided by scales
that make all standard deviations alike, as its authors run it in vLLM; codes are min-max per channel over the tile's
tokens (keys) or per token (values). The scales of that axis merge with those of the codes; the others are stored.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec.affine import half

TILE = 128  # tokens
ITERATIONS = 16
STD_RANGE = (1e-3, 1e3)  # limits of the divisor of one step
LOG_RANGE = (-0.3, 10.0)  # limits of the logarithm of a scale
LEAST = 1e-8  # standard deviation in an imbalance
AXES = {"keys": (-1, -2), "values": (-2, -1)}  # of the scales that are stored, and of the codes


def imbalance(x: np.ndarray) -> np.ndarray:
    """Return [..., 1, 1] of [..., T, R]: largest over smallest standard deviation of channels, plus that of tokens."""
    spreads = [x.std(axis, ddof=1, keepdims=True) for axis in (-2, -1)]
    ends = [(s.max((-2, -1), keepdims=True), s.min((-2, -1), keepdims=True)) for s in spreads]
    channels, tokens = (high / np.maximum(low, LEAST) for high, low in ends)
    return channels + tokens


def outer_scales(x: np.ndarray, side: str) -> np.ndarray:
    """Return the stored scales of a tile x [..., T, R]: of tokens [..., T, 1] for "keys", of channels [..., 1, R] for
    "values". One iteration divides along both axes, the codes' last; the most even state wins, the start included."""
    logs = {axis: np.zeros_like(x.std(axis, keepdims=True)) for axis in AXES[side]}
    stored = AXES[side][0]
    best, lowest, current = logs[stored], imbalance(x), x
    for _ in range(ITERATIONS):
        for axis in AXES[side]:
            step = np.log(np.clip(current.std(axis, ddof=1, keepdims=True), *STD_RANGE))
            logs[axis] = np.clip(logs[axis] + step, *LOG_RANGE)
            current = x / np.exp(logs[-1]) / np.exp(logs[-2])
        reached = imbalance(current)
        best = np.where(reached < lowest, logs[stored], best)
        lowest = np.minimum(reached, lowest)
    return np.exp(best)


def reconstructed(x: np.ndarray, bits: int, side: str) -> np.ndarray:
    """Return outer (scale code + bias) [..., T, R] of tiles x [..., T, R]; all numbers are rounded to float16 first."""
    outer = half(outer_scales(x, side))
    return coded(x / outer, bits, AXES[side][1]) * outer


def coded(y: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return scale code + bias of min-max codes along an axis."""
    low, top = half(y.min(axis, keepdims=True)), 2**bits - 1
    scale = half(np.maximum(y.max(axis, keepdims=True) - low, 0) / top)
    codes = np.clip(np.rint((y - low) / np.where(scale > 0, scale, 1.0)), 0, top)
    return scale * codes + low
