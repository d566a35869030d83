"""Learn transforms with Adam (SRFT paper, section 5): minimise the error of the codes on a sample.

Per layer, side and kv head, over up to 4096 keys and values from one
pass over some text. Rounding is a straight-through estimator; scales and biases of the codes are
differentiated, so a smaller range of a group counts as a gain. Spec: `spec/learned.py`. Letters: `G`
kv heads, `N` rows, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from mlxkv.calibration.measure import Progress
from mlxkv.calibration.moments import Sample, srft
from mlxkv.codec.codec import Codec
from mlxkv.codec.transform import Transform
from mlxkv.errors import MachineError
from mlxkv.formats.calibration.artifact import SIDES, Basis, Calibration
from mlxkv.formats.calibration.balance import Balance, fault
from mlxkv.formats.calibration.learned import Learned
from mlxkv.formats.config import LEARNED, Side
from mlxkv.formats.quantizers import Affine

RATE = {"scale": 0.02, "rotation": 0.01, "householder": 0.01}  # Adam's initial rate; falls to 0
HELD = 8  # one in this many rows, the last of the text, is held out
BATCH = 512  # rows per step
PAGE = 16  # any number: codes of a token do not depend on its page
TINY = 1e-20


@dataclass(frozen=True)
class LearnResult:
    """Error of the codes on held-out rows, |x^ - x|^2 / |x|^2, mean over kv heads: after random SRFT, and after the
    learned map."""

    held_srft: float
    held: float

    @property
    def held_gain(self) -> float:
        """Share of the held-out error of random SRFT that learning removed."""
        return 1 - self.held / max(self.held_srft, TINY)


Outcomes = dict[str, dict[str, LearnResult]]  # by layer and side


def learn(
    calibration: Calibration,
    samples: Mapping[str, Sample],
    learned: Learned,
    progress: Progress | None = None,
) -> tuple[Calibration, Outcomes]:
    """Return `calibration` with learned transforms in place of balanced ones, and the errors by layer and side.

    samples: of each layer, from `calibrate`. progress: called with 1 after each step of each layer
    and side. Raises UserError for unknown settings, MachineError for NaN or infinity.
    """
    learned.check()
    layers, outcomes, rows = {}, {}, 0
    for name, layer in calibration.layers.items():
        sides, outcomes[name] = {}, {}
        for side in SIDES:
            x = samples[name].rows(side)
            basis, outcome = _side(getattr(layer, side), x, learned, f"{name}, {side}", progress)
            sides[side], outcomes[name][side] = basis, outcome
            rows = max(rows, x.shape[1])
        layers[name] = replace(layer, **sides)
    learned = replace(learned, rows=rows - rows // HELD)
    return replace(calibration, layers=layers, learned=learned, path=None), outcomes


def steps(calibration: Calibration, learned: Learned) -> int:
    """Return how many steps `learn` reports to `progress`."""
    return len(calibration.layers) * len(SIDES) * learned.steps


def _side(
    basis: Basis, x: mx.array, learned: Learned, label: str, progress: Progress | None
) -> tuple[Basis, LearnResult]:
    count, dims = x.shape[1:]
    split = count - count // HELD
    rows, last = x[:, :split], x[:, split:] if split < count else x
    down = train(rows, learned, label, progress)
    if reason := fault(down):
        raise MachineError(f"[learn] layer {label}: the map has {reason}; try fewer --steps")
    stored = np.array(rows @ mx.array(down), np.float64)
    sigma = np.sqrt((stored**2).mean(1)).astype(np.float32)
    balance = Balance(down, np.maximum(sigma, np.finfo(np.float32).tiny))
    to, back = map(mx.array, balance.pair())
    pairs = srft(dims), Transform(to, back)
    outcome = LearnResult(*(error(last, learned.quantizer, pair) for pair in pairs))
    return replace(basis, balance=balance), outcome


def train(
    x: mx.array, learned: Learned, label: str, progress: Progress | None = None
) -> np.ndarray:
    """Learn down [G, D, D] float32 for rows x [G, N, D] float32; the base alone if that is better.

    Each step reads BATCH rows, in a fixed order. Raises MachineError.
    """
    dims = x.shape[-1]
    base = srft(dims).down if learned.base == "srft" else mx.eye(dims)
    params = identity(learned, x.shape[0], dims)
    judge = partial(loss, base=base, quantizer=learned.quantizer)
    step = mx.value_and_grad(judge)
    order = np.random.default_rng(0)
    adams = {
        name: optim.Adam(optim.cosine_decay(RATE[name], learned.steps), bias_correction=True)
        for name in params
    }
    first, queue = params, np.empty(0, np.int64)
    for _ in range(learned.steps):
        if len(queue) < min(BATCH, x.shape[1]):
            queue = order.permutation(x.shape[1])
        batch, queue = queue[:BATCH], queue[BATCH:]
        _, gradients = step(params, x=mx.take(x, mx.array(batch), axis=1))
        params = {
            name: adam.apply_gradients({name: gradients[name]}, {name: params[name]})[name]
            for name, adam in adams.items()
        }
        mx.eval(params)
        if progress:
            progress(1)
    start, end = (float(judge(p, x=x)) for p in (first, params))
    if not np.isfinite(start):
        raise MachineError(
            f"[learn] NaN or infinity in layer {label}; try another --dtype, or other text"
        )
    best = params if end < start else first  # also if it diverged to NaN
    with mx.stream(mx.cpu):  # GPUs may round the factors of float32 products to 11 bits
        return np.array(pair(best, base)[0])


def loss(params: Params, x: mx.array, base: mx.array, quantizer: Affine) -> mx.array:
    """Return the relative error of the codes of x [G, N, D], mean over kv heads."""
    down, up = pair(params, base)
    return relative(coded(x @ down, quantizer) @ up, x)


def relative(decoded: mx.array, x: mx.array) -> mx.array:
    """Return |decoded - x|^2 / |x|^2 of [G, N, D], mean over kv heads."""
    off = ((decoded - x) ** 2).sum((1, 2)) / mx.maximum((x**2).sum((1, 2)), TINY)
    return off.mean()


def coded(x: mx.array, quantizer: Affine) -> mx.array:
    """Return x [G, N, D] after min-max codes, with gradients; scales and biases are not rounded to float16."""
    size, dims = quantizer.group_size(x.shape[-1], PAGE), x.shape[-1]
    return mx.concatenate(
        [
            _group(x[..., i : min(i + size, dims)], 2**quantizer.bits - 1)
            for i in range(0, dims, size)
        ],
        axis=-1,
    )


def _group(x: mx.array, top: int) -> mx.array:
    low = x.min(-1, keepdims=True)
    step = (x.max(-1, keepdims=True) - low) / top
    step = mx.where(step > 0, step, 1.0)
    code = (x - low) / step
    return (code + mx.stop_gradient(mx.round(code) - code)) * step + low


def error(x: mx.array, quantizer: Affine, pair: Transform) -> float:
    """Return the relative error of x [G, N, D] as decoded by a cache with maps `pair`."""
    codec = Codec(Side(quantizer, LEARNED), x.shape[-1], PAGE, pair)
    return float(relative(codec.decode(codec.encode(x[None]), mx.float32)[0], x))


# -- Learned maps: rotations and scales as functions of free parameters, of all kv heads at once, in float32 by plain
# MLX ops with gradients. Letter: `K` reflectors.

LARGEST = 1024.0  # scale; the smallest is its inverse
# exp(A) = (Taylor series of A / 2^SQUARINGS to DEGREE) ^ 2^SQUARINGS. The error is 1e-6 at angles of 10
# radians, more than is needed.
SQUARINGS, DEGREE = 5, 6
LEAST = 1e-12  # squared length
Params = dict[str, mx.array]


def identity(learned: Learned, heads: int, dims: int) -> Params:
    """Return parameters of the identity, so that learning starts from the base alone."""
    out = {}
    if learned.rotation == "rotation":
        out["rotation"] = mx.zeros((heads, dims, dims))
    if learned.rotation == "householder":
        half = np.random.default_rng(0).standard_normal((heads, reflectors(dims) // 2, dims))
        half /= np.linalg.norm(half, axis=-1, keepdims=True)
        # A pair of equal reflectors is the identity, and a rotation as soon as they differ.
        out["householder"] = mx.array(half.repeat(2, axis=1).astype(np.float32))
    if learned.scaled:
        out["scale"] = mx.zeros((heads, dims))
    return out


def pair(params: Params, base: mx.array) -> tuple[mx.array, mx.array]:
    """Return (down, up) [G, D, D] after an orthogonal base [D, D]: stored = x @ down, x = stored @ up."""
    down = base[None]
    if "rotation" in params:
        down = down @ exponential(params["rotation"])
    if "householder" in params:
        down = reflected(down, params["householder"])
    up = down.swapaxes(-1, -2)
    if "scale" in params:
        by = scale(params["scale"])
        down, up = down * by[:, None], up / by[..., None]
    return down, up


def exponential(free: mx.array) -> mx.array:
    """Return rotations exp(L - L^T) [G, D, D], L the strict lower triangle of free [G, D, D]."""
    lower = mx.tril(free, -1)
    small = (lower - lower.swapaxes(-1, -2)) / 2**SQUARINGS
    eye = mx.eye(free.shape[-1])
    out = eye + small / DEGREE
    for i in range(DEGREE - 1, 0, -1):
        out = eye + small @ out / i
    for _ in range(SQUARINGS):
        out = out @ out
    return out


def reflected(x: mx.array, vectors: mx.array) -> mx.array:
    """Multiply x [G or 1, D, D] by the product of the reflectors of vectors [G, K, D], in order.

    Products are stored as I - W^T Y (Bischof and Van Loan 1987) and joined in pairs, in log2(K) rounds: applying
    reflectors one by one would take hundreds of tiny products.
    """
    heads, count, dims = vectors.shape
    y = mx.pad(vectors, [(0, 0), (0, 2 ** (count - 1).bit_length() - count), (0, 0)])
    w = y * (2 / mx.maximum((y * y).sum(-1, keepdims=True), LEAST))  # of padding: zeros
    w, y = (one[:, :, None] for one in (w, y))  # [G, blocks, reflectors of a block, D]
    while w.shape[1] > 1:
        first, second, over = w[:, ::2], w[:, 1::2], y[:, ::2]
        second = second - (second @ over.swapaxes(-1, -2)) @ first
        w = mx.concatenate([first, second], axis=2)
        y = mx.concatenate([over, y[:, 1::2]], axis=2)
    return x - (x @ w[:, 0].swapaxes(-1, -2)) @ y[:, 0]


def reflectors(dims: int) -> int:
    """Return K: half of dims, rounded up to an even number."""
    return 2 * -(-dims // 4)


def scale(free: mx.array) -> mx.array:
    """Return positive scales [G, D] with a geometric mean of 1, from free [G, D]."""
    bound = log(LARGEST)
    return mx.exp(mx.clip(free - free.mean(-1, keepdims=True), -bound, bound))
