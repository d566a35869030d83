"""Rebind the attention function in mlx-lm's model files, and count users to undo it exactly."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.view import CacheView
from mlxkv.models.hooks.probe import Handle
from mlxkv.models.hooks.taps import ObservedView

NAME = "scaled_dot_product_attention"
CACHE_MODULE = "mlx_lm.models.cache"  # load_prompt_cache looks classes up in its globals

Slot = tuple[str, str]  # module name, attribute


@dataclass
class _Bound:
    before: Any  # what the attribute was, or _ABSENT
    now: Any
    users: int


_ABSENT = object()
_bound: dict[Slot, _Bound] = {}


def files_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of `model` and its layers, bases included."""
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def bind(model: nn.Module) -> list[Slot]:
    """Route attention over our views to `attend` in every file of `model`; other calls are unchanged.

    Returns the slots to `release` later.
    """
    slots = []
    for file in files_of(model):
        if callable(original := getattr(file, NAME, None)):
            slots.append(_take(file, NAME, through(original)))
    for cls in (CompressedKVCache, AdaptiveKVCache):
        slots.append(_take(sys.modules[CACHE_MODULE], cls.__name__, cls))
    return slots


def release(slots: list[Slot]) -> None:
    """Undo one `bind`. The last user of a slot restores it."""
    for slot in slots:
        bound = _bound[slot]
        bound.users -= 1
        if bound.users:
            continue
        del _bound[slot]
        file, name = sys.modules[slot[0]], slot[1]
        if getattr(file, name, None) is not bound.now:
            continue  # patched by somebody else since: theirs stays
        if bound.before is _ABSENT:
            delattr(file, name)
        else:
            setattr(file, name, bound.before)


def _take(file: ModuleType, name: str, value: Any) -> Slot:
    slot = (file.__name__, name)
    if slot in _bound:
        _bound[slot].users += 1
    else:
        _bound[slot] = _Bound(getattr(file, name, _ABSENT), value, 1)
        setattr(file, name, value)
    return slot


def through(original):
    """Wrap `original`: calls over our views and handles go to our attention."""

    @wraps(original)
    def scaled_dot_product_attention(queries, keys, values, *args, **kwargs):
        if isinstance(keys, ObservedView):
            return keys.attended(queries, values, *args, **kwargs)
        if isinstance(keys, CacheView):
            return _attend(queries, keys, *args, **kwargs)
        if type(keys) is Handle:
            return keys.attended(queries, values, _has_sinks(*args, **kwargs))
        return original(queries, keys, values, *args, **kwargs)

    return scaled_dot_product_attention


def _has_sinks(cache=None, scale: float = 1.0, mask=None, sinks=None) -> bool:
    """Whether a call has attention sinks; the parameters are the rest of mlx-lm's signature."""
    return sinks is not None


def _attend(queries, view, cache=None, scale: float = 1.0, mask=None, sinks=None) -> mx.array:
    """Attention with mlx-lm's signature without values; `cache` is not used, the view holds all."""
    return attend(queries, view, scale, mask, sinks)
