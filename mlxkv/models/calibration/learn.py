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

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from mlxkv.codec import transform
from mlxkv.codec.codec import Codec
from mlxkv.codec.transform import Transform
from mlxkv.errors import MachineError
from mlxkv.formats.calibration.artifact import SIDES, Basis, Calibration
from mlxkv.formats.calibration.balance import Balance, fault
from mlxkv.formats.calibration.learned import Learned
from mlxkv.formats.config import LEARNED, Affine, Side
from mlxkv.models.calibration import parametrization
from mlxkv.models.calibration.measure import Progress
from mlxkv.models.calibration.moments import Sample

RATE = {"scale": 0.02, "rotation": 0.01, "householder": 0.01}  # of Adam at the start; falls to 0
HELD = 8  # one row in so many, the last of the text, is held out
BATCH = 512  # rows of a step
PAGE = 16  # any number: codes of a token do not depend on its page
TINY = 1e-20


@dataclass(frozen=True)
class Outcome:
    """Error of the codes, |x^ - x|^2 / |x|^2, mean of the kv heads, on rows that were held out: behind random SRFT, and
    behind the learned map."""

    held_srft: float
    held: float

    @property
    def held_gain(self) -> float:
        """Share of the held-out error of random SRFT that learning removed."""
        return 1 - self.held / max(self.held_srft, TINY)


Outcomes = dict[str, dict[str, Outcome]]  # by layer and side


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
    """Return how many steps `learn` reports to its progress."""
    return len(calibration.layers) * len(SIDES) * learned.steps


def _side(
    basis: Basis, x: mx.array, learned: Learned, label: str, progress: Progress | None
) -> tuple[Basis, Outcome]:
    count, dims = x.shape[1:]
    split = count - count // HELD
    rows, last = x[:, :split], x[:, split:] if split < count else x
    down = train(rows, learned, label, progress)
    if reason := fault(down):
        raise MachineError(f"[learn] layer {label}: the map has {reason}; try fewer --steps")
    stored = np.array(rows @ mx.array(down), np.float64)
    sigma = np.sqrt((stored**2).mean(1)).astype(np.float32)
    balance = Balance(down, np.maximum(sigma, np.finfo(np.float32).tiny))
    pairs = transform.make("srft", dims, 0), Transform(*map(mx.array, balance.pair()))
    outcome = Outcome(*(error(last, learned.spec, pair) for pair in pairs))
    return replace(basis, balance=balance), outcome


def train(
    x: mx.array, learned: Learned, label: str, progress: Progress | None = None
) -> np.ndarray:
    """Learn down [G, D, D] float32 for rows x [G, N, D] float32; the base alone where that is better.

    A step takes BATCH rows, in an order that is the same every time. Raises MachineError.
    """
    dims = x.shape[-1]
    base = transform.make("srft", dims, 0).down if learned.base == "srft" else mx.eye(dims)
    params = parametrization.start(learned, x.shape[0], dims)
    judge = partial(loss, base=base, spec=learned.spec)
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
    start, end = (judge(p, x=x).item() for p in (first, params))
    if not np.isfinite(start):
        raise MachineError(
            f"[learn] NaN or infinity in layer {label}; try another --dtype, or other text"
        )
    best = params if end < start else first  # also where it diverged to NaN
    with mx.stream(mx.cpu):  # GPUs may round the factors of float32 products to 11 bits
        return np.array(parametrization.pair(best, base)[0])


def loss(params: parametrization.Params, x: mx.array, base: mx.array, spec: Affine) -> mx.array:
    """Relative error of the codes of x [G, N, D], mean of the kv heads."""
    down, up = parametrization.pair(params, base)
    return relative(coded(x @ down, spec) @ up, x)


def relative(decoded: mx.array, x: mx.array) -> mx.array:
    """|decoded - x|^2 / |x|^2 of [G, N, D], mean of the kv heads."""
    off = ((decoded - x) ** 2).sum((1, 2)) / mx.maximum((x**2).sum((1, 2)), TINY)
    return off.mean()


def coded(x: mx.array, spec: Affine) -> mx.array:
    """x [G, N, D] after min-max codes, with gradients; scales and biases are not rounded to float16."""
    size, dims = spec.group_size(x.shape[-1], PAGE), x.shape[-1]
    return mx.concatenate(
        [_group(x[..., i : min(i + size, dims)], 2**spec.bits - 1) for i in range(0, dims, size)],
        axis=-1,
    )


def _group(x: mx.array, top: int) -> mx.array:
    low = x.min(-1, keepdims=True)
    step = (x.max(-1, keepdims=True) - low) / top
    step = mx.where(step > 0, step, 1.0)
    code = (x - low) / step
    return (code + mx.stop_gradient(mx.round(code) - code)) * step + low


def error(x: mx.array, spec: Affine, pair: Transform) -> float:
    """Relative error of what a cache decodes for x [G, N, D] behind `pair`."""
    codec = Codec(Side(spec, LEARNED), x.shape[-1], PAGE, pair)
    return relative(codec.decode(codec.encode(x[None]), mx.float32)[0], x).item()
