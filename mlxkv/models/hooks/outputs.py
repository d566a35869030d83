"""Measure what output projections make of an error in the values of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv.models.hooks.dryrun import CacheTrace, run
from mlxkv.models.hooks.probe import Place


def sensitivities(
    model: nn.Module, make_cache: Callable[[], list], places: Iterable[Place]
) -> dict[Place, np.ndarray]:
    """M_o [G, D, D] float64 of each cache: the sum over a kv head's query heads of W W^T, W [D, hidden]
    their rows of the output projection.

    Caches without one are left out: a gate or a norm comes between, or the projection serves other
    caches too. make_cache: the model's own. The attention function must be rebound. Projections are
    found in a dry run, by the array that they take, not by name.
    """
    places = list(places)
    try:
        traces = run(model, make_cache, places).traces
    except Exception:  # a foreign model may raise anything at all; identity serves as well
        return {}
    targets = {place: one.output_projection() for place, one in traces.items() if one.is_read_once}
    return {p: _moment(target, traces[p]) for p, target in targets.items() if target is not None}


def _moment(linear: nn.Module, trace: CacheTrace) -> np.ndarray:
    """[G, D, D]. The map is called, not read: its weights may be quantised."""
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
