"""THE SPEC of KVarN (arXiv 2606.03458), in NumPy float64: tiles of even spread, then min-max codes.

Written from the paper's algorithm as its authors run it in vLLM. A tile is the page of one kv head,
[T, R] tokens by stored dims, behind the rotation. Its tokens and channels are divided by scales that
make all standard deviations alike; codes are then min-max per channel over the tile's tokens (keys)
or per token (values). What is stored of the scales of one axis is one number each (`outer`); those of
the other merge with the scale and the bias of the codes:

    axis "channel" (keys):   x ~ outer[t] (scale[r] code + bias[r])
    axis "token" (values):   x ~ outer[r] (scale[t] code + bias[t])

As everywhere, numbers are rounded to float16 before codes are taken, `outer` first of all.
"""

from __future__ import annotations

import numpy as np

from mlxkv.reference import HALF_MAX, _half, hadamard, srft

ITERATIONS = 16
STD_RANGE = (1e-3, 1e3)  # what one step may divide by
LOG_RANGE = (-0.3, 10.0)  # of the logarithm of a scale
SMALLEST_STD = 1e-8  # below which an imbalance counts no further
# A state must be better by so much, where the paper takes the last of equals: scales that converge, or
# all stand at the floor, are equal but for rounding, and that must not decide which codes come out.
GAIN = 1e-3


def rotation(dims: int, seed: int = 0) -> np.ndarray:
    """[D, D]: Hadamard's matrix where D is a power of two, else the real Fourier transform."""
    return srft(np.eye(dims), seed) if dims & (dims - 1) else hadamard(dims, seed)


def imbalance(x: np.ndarray) -> np.ndarray:
    """[..., T, R] -> [...]: largest over smallest standard deviation of the channels, plus the same
    of the tokens; 2 is even."""
    spreads = (x.std(axis, ddof=1) for axis in (-2, -1))
    return sum(s.max(-1) / np.maximum(s.min(-1), SMALLEST_STD) for s in spreads)


def balance(
    x: np.ndarray, axis: str, unit_std: bool = False, iterations: int = ITERATIONS
) -> tuple[np.ndarray, np.ndarray]:
    """(scales of the tokens [..., T, 1], scales of the channels [..., 1, R]) of a tile [..., T, R].

    One iteration divides by the standard deviations along the outer axis, then along that of the
    codes, and keeps the logarithms of the products. The state with the lowest imbalance wins, the
    first of those within GAIN; the start counts. unit_std: the tile is divided by its own standard deviation
    first (not in the paper): below .741, the smallest scale that LOG_RANGE lets through, the paper's
    scales stay at that floor and do nothing.
    """
    x = np.asarray(x, np.float64)
    if unit_std:
        std = x.std((-2, -1), ddof=1, keepdims=True)
        x = x / np.where(std > 0, std, 1.0)
    logs = {-1: np.zeros((*x.shape[:-1], 1)), -2: np.zeros((*x.shape[:-2], 1, x.shape[-1]))}
    best, lowest = dict(logs), imbalance(x)
    # A standard deviation over axis -1 belongs to a token. The axis of the codes comes last.
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
    """One tile per leading index, x: [..., T, R] -> codes (uint8, [..., T, R]), scale, bias, outer
    (float64 holding float16 values).

    scale, bias: [..., 1, R] and outer [..., T, 1] for axis "channel"; [..., T, 1] and [..., 1, R] for
    axis "token". quantile: this share at either end of a row of codes lies outside its range and is
    clipped (KVARN_RTN_QUANTILE; linear between the two nearest values).
    """
    tokens, channels = balance(x, axis, unit_std)
    return encode_balanced(
        x, _half(tokens if axis == "channel" else channels), bits, axis, quantile
    )


def encode_balanced(
    x: np.ndarray, outer: np.ndarray, bits: int, axis: str, quantile: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`encode` where `outer` is known. The scales of the other axis need not be: a range per row
    takes them in."""
    y, over, top = np.asarray(x, np.float64) / outer, -2 if axis == "channel" else -1, 2**bits - 1
    bias = _half(np.quantile(y, quantile, over, keepdims=True), HALF_MAX)
    high = np.quantile(y, 1 - quantile, over, keepdims=True)
    scale = _half(np.maximum(high - bias, 0.0) / top)
    codes = np.clip(np.rint((y - bias) / np.where(scale > 0, scale, 1.0)), 0, top)
    return codes.astype(np.uint8), scale, bias, outer


def decode(codes: np.ndarray, scale: np.ndarray, bias: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """outer (scale code + bias): [..., T, R]."""
    return outer * (scale * codes.astype(np.float64) + bias)
