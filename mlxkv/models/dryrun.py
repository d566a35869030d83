"""A run of a model on a few tokens that notes what its linear maps take and give around each cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlxkv.models.probe import Place, put
from mlxkv.models.taps import Call, Ear, has_matrix, hook

TOKENS = 8
NEAR = 16  # calls of linear maps before and after a cache that may belong to it

Used = tuple[nn.Module, mx.array, mx.array]  # a linear map, its input, its output


@dataclass
class Seen:
    """Around one cache. handed: values [1, G, T, D] of each update. calls: of attention. before,
    after: the linear maps called last before an update, and first after attention."""

    handed: list[mx.array] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    before: list[Used] = field(default_factory=list)
    after: list[Used] = field(default_factory=list)


@dataclass
class Run:
    """seen: by cache. logits: [1, T, vocabulary]."""

    seen: dict[Place, Seen]
    logits: mx.array


def run(model: nn.Module, make_cache: Callable[[], list], places: Iterable[Place]) -> Run:
    """One pass over TOKENS tokens, the plain caches of `make_cache()` at `places` listened to.

    The attention function must be rebound.
    """
    seen = {place: Seen() for place in places}
    recent: deque[Used] = deque(maxlen=NEAR)
    open_: list[Seen] = []  # caches whose attention is past, the last few maps still of interest

    def linear(call: Callable, *args, **kwargs):
        y = call(*args, **kwargs)
        if args and isinstance(y, mx.array):
            used = (call.args[0], args[0], y)
            recent.append(used)
            for one in open_:
                one.after.append(used)
            open_[:] = [one for one in open_ if len(one.after) < NEAR]
        return y

    def handed(one: Seen, keys: mx.array, values: mx.array) -> None:
        one.handed.append(values)
        one.before = list(recent)

    def attended(one: Seen, call: Call) -> None:
        one.calls.append(call)
        open_.append(one)

    caches = make_cache()
    for place, one in seen.items():
        put(caches, place, Ear(partial(attended, one), partial(handed, one)))
    maps = {id(m): m for layer in model.layers for m in layer.modules() if has_matrix(m)}
    hooked = []
    try:
        hooked += [hook(module, linear) for module in maps.values()]
        logits = model(mx.arange(1, TOKENS + 1)[None], cache=caches)
    finally:
        for module, cls in reversed(hooked):
            object.__setattr__(module, "__class__", cls)
    used = [pair[1:] for one in seen.values() for pair in (*one.before, *one.after)]
    mx.eval(logits, used, [(one.handed, [call.out for call in one.calls]) for one in seen.values()])
    return Run(seen, logits)
