"""Run a model on a few tokens and record the linear maps called around each cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv.patching.observers import AttentionCall, PlainObserver, joined, reads
from mlxkv.patching.record import LinearCall, record
from mlxkv.patching.trees import Place, own_caches, put

TOKENS = 8
NEAR = 16  # how many calls of linear maps before and after a cache may belong to it


@dataclass
class CacheTrace:
    """The calls around one cache.

    values: [1, G, T, D] of each update. calls: of attention. sources: the linear maps called last
    before an update. readers: those called first after attention.
    """

    values: list[mx.array] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    sources: list[LinearCall] = field(default_factory=list)
    readers: list[LinearCall] = field(default_factory=list)

    @property
    def is_read_once(self) -> bool:
        """Return whether one attention call reads the one update."""
        return len(self.values) == len(self.calls) == 1

    def output_projection(self) -> nn.Module | None:
        """Return the first linear map whose input is exactly the output of attention, or None."""
        out = self.calls[0].out
        return next((module for module, x, _ in self.readers if reads(x, out)), None)


@dataclass
class DryRun:
    """traces: by cache. logits: [1, T, vocabulary]."""

    traces: dict[Place, CacheTrace]
    logits: mx.array


def run_dry(model: nn.Module, places: Iterable[Place]) -> DryRun:
    """Run `model` once over TOKENS tokens, with observers in place of its own plain caches at `places`.

    The attention function must be patched. Raises what the model's code raises.
    """
    traces = {place: CacheTrace() for place in places}
    calls: list[LinearCall] = []
    attentions: list[tuple[CacheTrace, int]] = []  # and the number of earlier calls

    def updated(trace: CacheTrace, keys: mx.array, values: mx.array) -> None:
        trace.values.append(values)
        trace.sources = calls[-NEAR:]

    def attended(trace: CacheTrace, call: AttentionCall) -> None:
        trace.calls.append(call)
        attentions.append((trace, len(calls)))

    caches = own_caches(model)
    for place, entry in traces.items():
        put(caches, place, PlainObserver(partial(attended, entry), partial(updated, entry)))
    recording = record(model, caches, (TOKENS,), calls)
    if recording.error is not None:
        raise recording.error
    for trace, start in attentions:
        trace.readers += calls[start : start + NEAR]
    pairs = [pair[1:] for entry in traces.values() for pair in (*entry.sources, *entry.readers)]
    arrays = [(entry.values, [call.out for call in entry.calls]) for entry in traces.values()]
    mx.eval(recording.logits, pairs, arrays)
    return DryRun(traces, recording.logits)


# -- Measure how output projections amplify errors in the values of a cache.


def sensitivities(model: nn.Module, places: Iterable[Place]) -> dict[Place, np.ndarray]:
    """Return M_o [G, D, D] float64 of each cache: the sum of W W^T over the query heads of a kv head, where W
    [D, hidden] are a head's rows of the output projection.

    Omits caches without one: with a gate or a norm in between, or a projection shared by several caches. The attention
    function must be patched. A dry run finds projections by their input array, not by name.
    """
    pairs = _projections(model, places)
    return {place: _moment(target, trace) for place, (trace, target) in pairs.items()}


def projections(
    model: nn.Module, places: Iterable[Place]
) -> dict[Place, Callable[[mx.array], mx.array]]:
    """Return the output projection of each cache, as in `sensitivities`, as a linear map without bias, [B, H, L, Dv] ->
    [B, L, hidden]."""

    def linear(target: nn.Module, heads: mx.array) -> mx.array:
        x = joined(heads)
        return target(x) - target(mx.zeros_like(x))

    pairs = _projections(model, places)
    return {place: partial(linear, target) for place, (_, target) in pairs.items()}


def _projections(
    model: nn.Module, places: Iterable[Place]
) -> dict[Place, tuple[CacheTrace, nn.Module]]:
    try:
        traces = run_dry(model, list(places)).traces
    except Exception:  # a foreign model may raise any error; fall back to identity
        return {}
    pairs = {p: (x, x.output_projection()) for p, x in traces.items() if x.is_read_once}
    return {place: (x, linear) for place, (x, linear) in pairs.items() if linear is not None}


def _moment(linear: nn.Module, trace: CacheTrace) -> np.ndarray:
    """Return M_o [G, D, D]. Calls the map instead of reading its weights, which may be quantised."""
    (_, heads, _, dims), kv_heads = trace.calls[0].out.shape, trace.values[0].shape[1]
    group = heads // kv_heads
    out = np.zeros((kv_heads, dims, dims))
    zero = linear(mx.zeros((1, heads * dims)))
    for head in range(heads):
        rows = mx.zeros((dims, heads * dims))
        rows[:, head * dims : (head + 1) * dims] = mx.eye(dims)
        w = (linear(rows) - zero).astype(mx.float32)
        out[head // group] += np.array(w @ w.T, np.float64)
    return out
