"""Run a model dry on a few tokens and record its calls and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

PROMPT = 2  # tokens of a short prompt, more than a decode step has

LinearCall = tuple[nn.Module, mx.array, mx.array]  # a linear map, its input, its output


@dataclass(frozen=True)
class Recording:
    """The results or the error of calls of a model.

    logits: of the last call, None after an error. calls: of linear maps, in order, if requested.
    """

    logits: Any
    error: Exception | None
    calls: list[LinearCall]


def record(
    model: nn.Module,
    caches: list,
    tokens: Sequence[int] = (PROMPT,),
    calls: list[LinearCall] | None = None,
) -> Recording:
    """Call `model` with `caches` once per item of `tokens`, the number of tokens in that call. Computes nothing: MLX is
    lazy.

    calls: if given, calls of linear maps are appended to it. Any error of a foreign model is recorded.
    """
    logits = None

    def note(call: partial, *args, **kwargs):
        y = call(*args, **kwargs)
        if calls is not None and args and isinstance(y, mx.array):
            calls.append((call.args[0], args[0], y))
        return y

    maps = {} if calls is None else {id(m): m for m in model.modules() if _is_map(m)}
    for adapted in [m for m in maps.values() if "lora_a" in m]:  # the map is both together
        maps.pop(id(adapted.get("linear")), None)
    try:
        with _hooked(list(maps.values()), note):
            for count in tokens:
                logits = model(mx.arange(1, count + 1)[None], cache=caches)
    except Exception as error:
        return Recording(None, error, calls or [])
    return Recording(logits, None, calls or [])


def _is_map(module: nn.Module) -> bool:
    """Return whether `module` has a weight matrix of its own, as linear maps do, or one per expert."""
    holds = any(isinstance(x, mx.array) and x.ndim > 1 for x in module.values())
    return holds and not isinstance(module, nn.Embedding)


@contextmanager
def _hooked(modules: list[nn.Module], around: Callable) -> Iterator[None]:
    """Route calls of `modules` through `around(call, *args, **kwargs)` in this block."""
    classes = [(module, type(module)) for module in modules]
    try:
        for module, cls in classes:
            object.__setattr__(module, "__class__", _routed(cls, around))
        yield
    finally:
        for module, cls in classes:
            object.__setattr__(module, "__class__", cls)


def _routed(cls: type, around: Callable) -> type:
    def __call__(self, *args, **kwargs):
        return around(partial(cls.__call__, self), *args, **kwargs)

    members = {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)
