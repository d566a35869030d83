"""Measure the cost of errors in keys and in values for the model, per kv head. Spec: `mlxkv.spec.mixed_bits`.

To first order, an error d in the output of attention changes the log-likelihood of a reply by g . d, with gradient g,
and KL by half of E (g . d)^2: by d^T F d / 2, where F = E g g^T over tokens drawn by the model (Fisher information).
Letters: `B` batch, `G` kv heads, `H` query heads, `C` asked queries, `T` tokens, `Dv` dims of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv import console, errors
from mlxkv.formats.calibration import sums
from mlxkv.formats.calibration.sums import DIFFERENTIATED, FIRST, TIMES
from mlxkv.patching.observers import AttentionCall, PlainObserver
from mlxkv.patching.trees import Place, own_caches, put


@dataclass
class ExchangeMeasure(sums.Exchange):
    """The sums of `Exchange`, with the root of F."""

    root: mx.array = field(init=False, repr=False)

    def __post_init__(self):
        self.root = mx.array(sums.root(self.fisher))

    def add(self, call: AttentionCall, rows: mx.array, far: mx.array, sink: int) -> mx.array:
        """Add one call of attention: its queries `rows` [C], and their attention to far tokens, [B, H, C, T].

        Return the cost of a nat^2 of noise in the scores of each of these queries, [G, B H / G C].
        """
        values = call.exact[1].astype(mx.float32) @ self.root
        out = call.out[:, :, rows].astype(mx.float32)
        batch, kv_heads, total, dims = values.shape
        out = out.reshape(batch, kv_heads, -1, dims) @ self.root
        squares = far.reshape(batch, kv_heads, -1, total)[..., sink:] ** 2
        values = values[:, :, sink:]
        apart = (values**2).sum(-1)[:, :, None] + (out**2).sum(-1, keepdims=True)
        apart = mx.maximum(apart - 2 * out @ values.swapaxes(-1, -2), 0)
        costs = (squares * apart).sum(-1)
        self.keys = self.keys + np.array(costs.sum((0, 2)), np.float64)
        self.values = self.values + np.array(squares.sum((0, 2, 3)), np.float64)
        self.queries += batch * out.shape[2]
        return costs.swapaxes(0, 1).reshape(kv_heads, -1)


def fisher(
    model: nn.Module,
    heads: dict[Place, int],
    tokens: Sequence[int],
    first: Sequence[int],
    progress: Callable[[int], None] | None = None,
) -> dict[Place, np.ndarray]:
    """Return F [G, Dv, Dv] float64 of each cache, the sum over the query heads of a kv head; {}, and a line on stderr,
    if the model cannot be differentiated, or gradients are NaN or all 0. Raises RuntimeError if the GPU is
    lost.

    heads: kv heads by cache. first: ids in front of each window. progress: called with the tokens done since the last
    call. The attention function must be patched.
    """
    totals, count = dict.fromkeys(heads, np.zeros(())), 0
    try:
        for i in range(TIMES):
            part = list(tokens[i * DIFFERENTIATED : (i + 1) * DIFFERENTIATED])
            if len(part) <= FIRST:
                break
            count += len(first) + len(part) - FIRST
            gradients = _gradients(model, heads, [*first, *part], i)
            for (place, kv_heads), g in zip(heads.items(), gradients, strict=True):
                g = g[0, :, FIRST:].reshape(kv_heads, -1, g.shape[3])
                totals[place] = totals[place] + np.array(g.swapaxes(-1, -2) @ g, np.float64)
            if progress:
                progress(len(part))
    except Exception as error:  # a foreign model may raise any error; fall back to equal layers
        if errors.is_of_lost_gpu(error):  # all later results would be wrong
            raise
        console.note(
            f"[calibrate] errors count alike in all layers: no gradient ({errors.reason(error)})"
        )
        return {}
    return sums.information(totals, count)


def _gradients(
    model: nn.Module, places: Iterable[Place], ids: list[int], seed: int
) -> list[mx.array]:
    """Return the gradients, float32, of the log-likelihood of tokens drawn by the model for each output of
    attention."""
    order = list(places)
    shapes: list[tuple[int, ...]] = [()] * len(order)  # of the outputs for one token

    def run(tokens: mx.array, shifts: Sequence[mx.array] | None) -> mx.array:
        def shifted(i: int, call: AttentionCall) -> mx.array | None:
            shapes[i] = call.out.shape
            return call.out + shifts[i].astype(call.out.dtype) if shifts else None

        caches = own_caches(model)
        for i, place in enumerate(order):
            put(caches, place, PlainObserver(partial(shifted, i)))
        return model(tokens, cache=caches).astype(mx.float32)

    tokens = mx.array(ids)[None]
    run(tokens[:, :1], None)

    def likelihood(shifts: list[mx.array]) -> mx.array:
        logits = run(tokens, shifts)
        drawn = mx.random.categorical(mx.stop_gradient(logits), key=mx.random.key(seed))
        chosen = mx.take_along_axis(logits, drawn[..., None], -1)[..., 0]
        return (chosen - mx.logsumexp(logits, -1)).sum()

    zeros = [mx.zeros((b, heads, len(ids), dims)) for b, heads, _, dims in shapes]
    gradients = mx.grad(likelihood)(zeros)
    mx.eval(gradients)
    return gradients
