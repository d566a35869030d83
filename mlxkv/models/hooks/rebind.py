"""Rebind the attention function in mlx-lm's model files, and count users to undo it exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_cache

from mlxkv.cache.attention import attend
from mlxkv.cache.view import CacheView
from mlxkv.models.hooks import own_code
from mlxkv.models.hooks.probe import Handle
from mlxkv.models.hooks.taps import LatentObserver, ObservedView

NAME = "scaled_dot_product_attention"
CALL = "__call__"
MARK = "_mlxkv_attachment"  # the attribute of an attached model

Slot = tuple[str, str]  # module name, attribute, of a class in it where there is a dot


@dataclass
class _Bound:
    before: Callable  # what the attribute was
    now: Callable
    users: int


_bound: dict[Slot, _Bound] = {}


def files_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of `model` and its layers, bases included."""
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def bind(model: nn.Module) -> list[Slot]:
    """Route attention over our views to `attend` in every file of `model`; other calls are unchanged.

    Returns the slots to `release` later.
    """
    files = files_of(model)
    slots = [(file.__name__, NAME) for file in files if callable(getattr(file, NAME, None))]
    own = [(f"mlx_lm.models.{family}", name) for family, name in OWN_CODE]
    there = {file.__name__ for file in files}
    slots += [slot for slot in own if slot[0] in there and slot not in slots]
    return take([*slots, *_call_of(model)])


def _call_of(model: nn.Module) -> list[Slot]:
    """The slot of the model's own call; none for a class that its module does not name."""
    cls = next(cls for cls in type(model).__mro__ if CALL in vars(cls))
    named = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return [(cls.__module__, f"{cls.__name__}.{CALL}")] if named and cls is not nn.Module else []


def call_before(model: nn.Module) -> Callable | None:
    """The call of the model's class as it was before `bind`; None where `bind` leaves it as it is."""
    return next((_bound[slot].before for slot in _call_of(model)), None)


def take(slots: list[Slot]) -> list[Slot]:
    """Count one more user of each slot; the first one rebinds it. Returns the slots."""
    for slot in slots:
        if slot in _bound:
            _bound[slot].users += 1
            continue
        owner, name = _place(slot)
        before = getattr(owner, name)
        _bound[slot] = _Bound(before, _wrap(slot)(before), 1)
        setattr(owner, name, _bound[slot].now)
    return slots


def _wrap(slot: Slot) -> Callable:
    """Return what the attribute is wrapped by."""
    package, _, family = slot[0].rpartition(".")
    if package == "mlx_lm.models" and (family, slot[1]) in OWN_CODE:
        return OWN_CODE[family, slot[1]]
    return through if slot[1] == NAME else stepped


def release(slots: list[Slot]) -> None:
    """Undo one `bind`. The last user of a slot restores it."""
    for slot in slots:
        bound = _bound[slot]
        bound.users -= 1
        if bound.users:
            continue
        del _bound[slot]
        owner, name = _place(slot)
        if getattr(owner, name, None) is bound.now:  # else patched by somebody since: theirs stays
            setattr(owner, name, bound.before)


def _place(slot: Slot) -> tuple[ModuleType | type, str]:
    """The module or class, and the attribute."""
    inside, _, name = slot[1].rpartition(".")
    file = sys.modules[slot[0]]
    return (getattr(file, inside) if inside else file), name


def stepped(original):
    """Wrap `original`, the call of a class of models: a decode step of a model that is attached is replayed
    where it can be (`models.compiled`)."""

    @wraps(original)
    def __call__(self, *args, **kwargs):
        attachment = vars(self).get(MARK)
        if attachment is None:
            return original(self, *args, **kwargs)
        with attachment.steps.lock:  # while one thread traces, the weights are its placeholders
            if (step := _step_of(*args, **kwargs)) is not None:
                out = attachment.steps(self, original, *step)
                if out is not None:
                    return out
            return original(self, *args, **kwargs)

    return __call__


def _step_of(
    inputs=None, cache=None, *others, inputs_embeds=None, logits_to_keep=None, **more
) -> tuple | None:
    """Tokens and caches of a call that gives nothing else; None for other calls. mlx-vlm says that there are
    no embeddings, and that it wants the logits of one token, of which there is one."""
    if inputs is None or cache is None or others or more or inputs_embeds is not None:
        return None
    if logits_to_keep and inputs.shape[-1] != 1:
        return None
    return inputs, cache


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
        if isinstance(cache := _first(kwargs.get("cache")), LatentObserver):
            cache.on_queries(queries, kwargs["scale"])
        return original(queries, keys, values, *args, **kwargs)

    return scaled_dot_product_attention


def _first(cache):
    """The cache, or the first one in a list of caches."""
    return cache.caches[0] if isinstance(cache, mlx_cache.CacheList) else cache


def _has_sinks(cache=None, scale: float = 1.0, mask=None, sinks=None) -> bool:
    """Return whether a call has attention sinks; the parameters are the rest of mlx-lm's signature."""
    return sinks is not None


def _attend(queries, view, cache=None, scale: float = 1.0, mask=None, sinks=None) -> mx.array:
    """Attention with mlx-lm's signature without values; `cache` is not used, the view holds all."""
    return attend(queries, view, scale, mask, sinks)


# (Family, attribute): what is rebound besides in families whose files have attention code of their own.
OWN_CODE: dict[tuple[str, str], Callable] = {
    ("gear", "_softcap_attention"): own_code.capped,
    ("gemma2", f"Attention.{CALL}"): own_code.gemma2,
    ("phi3small", "Attention._block_sparse_attention"): own_code.block_sparse,
    ("plamo", "mx"): own_code.functions(through),
    ("plamo", NAME): own_code.tiled(through),
    ("plamo2", "mx"): own_code.functions(through),
}
