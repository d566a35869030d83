"""What output projections make of an error in the values of a cache: `sensitivities`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxkv.models.dryrun import Run, run
from mlxkv.models.probe import Place
from mlxkv.models.taps import joined


def sensitivities(
    model: nn.Module, make_cache: Callable[[], list], places: Iterable[Place]
) -> dict[Place, np.ndarray]:
    """Per cache M_o [G, D, D] float64: the sum over a kv head's query heads of W W^T, W [D, hidden]
    their rows of the output projection. Caches for which there is none, because a gate or a norm
    comes between or the projection serves other caches too, are left out.

    make_cache: the model's own. The attention function must be rebound. As in `mlxkv.models.fold`
    nothing is told by names: the projection takes exactly what attention gives out, in a dry run.
    """
    places = list(places)
    try:
        found = run(model, make_cache, places)
    except Exception:  # a foreign model may raise anything at all; identity serves as well
        return {}
    maps = {place: target for place in places if (target := _target(found, place)) is not None}
    return {
        place: _moment(target, found.seen[place].calls[0].out.shape, _heads(found, place))
        for place, target in maps.items()
    }


def _heads(found: Run, place: Place) -> int:
    return found.seen[place].handed[0].shape[1]


def _target(found: Run, place: Place) -> nn.Module | None:
    seen = found.seen[place]
    if len(seen.handed) != 1 or len(seen.calls) != 1:
        return None
    flat = joined(seen.calls[0].out)
    takes = (
        module
        for module, x, _ in seen.after
        if x.shape == flat.shape and mx.array_equal(x, flat.astype(x.dtype)).item()
    )
    return next(takes, None)


def _moment(linear: nn.Module, shape: tuple[int, ...], kv_heads: int) -> np.ndarray:
    """shape: [B, H, L, D] of what attention gives out. The map is asked, not read: its weights may be
    quantised."""
    heads, dims = shape[1], shape[3]
    group = heads // kv_heads
    out = np.zeros((kv_heads, dims, dims))
    zero = linear(mx.zeros((1, heads * dims)))
    for head in range(heads):
        rows = mx.zeros((dims, heads * dims))
        rows[:, head * dims : (head + 1) * dims] = mx.eye(dims)
        w = (linear(rows) - zero).astype(mx.float32)
        out[head // group] += np.array(w @ w.T, np.float64)
    return out
