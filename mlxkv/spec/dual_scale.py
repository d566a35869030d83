"""THE SPEC of KVarN (arXiv 2606.03458), in NumPy float64: tiles of even spread, then min-max codes.

Written from the paper's algorithm as its authors run it in vLLM. A tile is the page of one kv head,
[T, R] tokens by stored dims, after the rotation. Its tokens and channels are divided by scales that
make all standard deviations alike; codes are then min-max per channel over the tile's tokens (keys)
or per token (values). The scales of one axis are stored (`outer`); the scales of the other merge with
the scale and the bias of the codes:

    axis "channel" (keys):   x ~ outer[t] (scale[r] code + bias[r])
    axis "token" (values):   x ~ outer[r] (scale[t] code + bias[t])

Numbers are rounded to float16 before codes are computed, `outer` first.
"""

from __future__ import annotations

import numpy as np

from mlxkv.spec.affine import HALF_MAX, _half, hadamard, srft

ITERATIONS = 16
STD_RANGE = (1e-3, 1e3)  # limits of the divisor of one step
LOG_RANGE = (-0.3, 10.0)  # limits of the logarithm of a scale
SMALLEST_STD = 1e-8  # least standard deviation in an imbalance
# A state replaces the best one only if better by this share; the paper takes the last of equals. Scales
# that converge, or all lie at the floor, differ by rounding alone, which must not decide the codes.
GAIN = 1e-3


def rotation(dims: int, seed: int = 0) -> np.ndarray:
    """Return [D, D]: the Hadamard matrix where D is a power of two, else the real Fourier transform."""
    return srft(np.eye(dims), seed) if dims & (dims - 1) else hadamard(dims, seed)


def imbalance(x: np.ndarray) -> np.ndarray:
    """Return [...] of [..., T, R]: largest over smallest standard deviation of the channels, plus the same of
    the tokens; 2 is perfectly even."""
    spreads = (x.std(axis, ddof=1) for axis in (-2, -1))
    return sum(s.max(-1) / np.maximum(s.min(-1), SMALLEST_STD) for s in spreads)


def balance(
    x: np.ndarray, axis: str, unit_std: bool = False, iterations: int = ITERATIONS
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of the tokens [..., T, 1] and of the channels [..., 1, R] of a tile [..., T, R].

    One iteration divides by the standard deviations along the outer axis, then along the axis of the
    codes, and keeps the logarithms of the products. The state with the lowest imbalance wins, the
    first of those within GAIN; the start counts.
    unit_std: divide the tile by its standard deviation first (not in the paper). In tiles below .741, the
    smallest scale that LOG_RANGE allows, the paper's scales stay at that floor and do nothing.
    """
    x = np.asarray(x, np.float64)
    if unit_std:
        std = x.std((-2, -1), ddof=1, keepdims=True)
        x = x / np.where(std > 0, std, 1.0)
    logs = {-1: np.zeros((*x.shape[:-1], 1)), -2: np.zeros((*x.shape[:-2], 1, x.shape[-1]))}
    best, lowest = dict(logs), imbalance(x)
    # A standard deviation over axis -1 is a token's. The axis of the codes comes last.
    order = (-1, -2) if axis == "channel" else (-2, -1)
    current = x
    for _ in range(iterations):
        for over in order:
            std = np.clip(current.std(over, ddof=1, keepdims=True), *STD_RANGE)
            logs[over] = np.clip(logs[over] + np.log(std), *LOG_RANGE)
            current = x / np.exp(logs[-2]) / np.exp(logs[-1])
        reached = imbalance(current)
        better = reached < lowest * (1 - GAIN)
        lowest = np.where(better, reached, lowest)
        best = {n: np.where(better[..., None, None], logs[n], best[n]) for n in logs}
    return np.exp(best[-1]), np.exp(best[-2])


def encode(
    x: np.ndarray, bits: int, axis: str, unit_std: bool = False, quantile: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Encode one tile per leading index of x [..., T, R].

    quantile: share at either end of a row of codes that is clipped (KVARN_RTN_QUANTILE; linear between
        the two nearest values).
    Returns codes (uint8 [..., T, R]), scale, bias, outer (float64 holding float16 values): scale and bias
    [..., 1, R] and outer [..., T, 1] for axis "channel"; [..., T, 1] and [..., 1, R] for axis "token".
    """
    tokens, channels = balance(x, axis, unit_std)
    return encode_balanced(
        x, _half(tokens if axis == "channel" else channels), bits, axis, quantile
    )


def encode_balanced(
    x: np.ndarray, outer: np.ndarray, bits: int, axis: str, quantile: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Encode with a known `outer`. The scales of the other axis are not needed: the range of a row contains
    them."""
    y, over, top = np.asarray(x, np.float64) / outer, -2 if axis == "channel" else -1, 2**bits - 1
    bias = _half(np.quantile(y, quantile, over, keepdims=True), HALF_MAX)
    high = np.quantile(y, 1 - quantile, over, keepdims=True)
    scale = _half(np.maximum(high - bias, 0.0) / top)
    codes = np.clip(np.rint((y - bias) / np.where(scale > 0, scale, 1.0)), 0, top)
    return codes.astype(np.uint8), scale, bias, outer


def decode(codes: np.ndarray, scale: np.ndarray, bias: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Return outer (scale code + bias): [..., T, R]."""
    return outer * (scale * codes.astype(np.float64) + bias)
