"""Patch the attention function in mlx-lm's model files, and count users to undo it exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any, TypeGuard

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from mlxkv.cache.attention import attend
from mlxkv.cache.view import View
from mlxkv.patching.probe import Handle, files_of
from mlxkv.patching.trees import MARK

NAME = "scaled_dot_product_attention"
PARAMETERS = ("cache", "scale", "mask", "sinks")  # of attention, after queries, keys and values
CALL = "__call__"

Slot = tuple[str, str]  # module name, attribute ("Class.method" for a method)


@dataclass
class _Patch:
    original: Callable
    wrapper: Callable
    users: int


_patches: dict[Slot, _Patch] = {}


def patch(model: nn.Module) -> list[Slot]:
    """Route attention over our views to `attend` in every file of `model`; other calls are unchanged.

    Returns the slots to `unpatch` later.
    """
    files = files_of(model)
    slots = [(file.__name__, NAME) for file in files if callable(getattr(file, NAME, None))]
    names = {file.__name__ for file in files}
    own_code = [(f"mlx_lm.models.{family}", name) for family, name in OWN_CODE]
    slots += [slot for slot in own_code if slot[0] in names]
    return patch_slots([*slots, *_call_of(model)])


@contextmanager
def patched(model: nn.Module) -> Iterator[None]:
    """Patch the files of `model` in this block (`patch`)."""
    slots = patch(model)
    try:
        yield
    finally:
        unpatch(slots)


def _call_of(model: nn.Module) -> list[Slot]:
    """Return the slot of the model's `__call__`; none if its module does not export the class."""
    cls = next(cls for cls in type(model).__mro__ if CALL in vars(cls))
    named = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return [(cls.__module__, f"{cls.__name__}.{CALL}")] if named and cls is not nn.Module else []


def patch_slots(slots: list[Slot]) -> list[Slot]:
    """Count one more user of each slot; the first one patches it. Returns the slots."""
    for slot in slots:
        if slot in _patches:
            _patches[slot].users += 1
            continue
        owner, name = _place(slot)
        original = getattr(owner, name)
        _patches[slot] = _Patch(original, _wrap(slot)(original), 1)
        setattr(owner, name, _patches[slot].wrapper)
    return slots


def _wrap(slot: Slot) -> Callable:
    """Return the wrapper for the attribute."""
    package, _, family = slot[0].rpartition(".")
    if package == "mlx_lm.models" and (family, slot[1]) in OWN_CODE:
        return OWN_CODE[family, slot[1]]
    return attention_wrapper if slot[1] == NAME else step_wrapper


def unpatch(slots: list[Slot]) -> None:
    """Undo one `patch`. The last user of a slot restores it."""
    for slot in slots:
        patched = _patches[slot]
        patched.users -= 1
        if patched.users:
            continue
        del _patches[slot]
        owner, name = _place(slot)
        # Otherwise someone patched it since: keep theirs.
        if getattr(owner, name, None) is patched.wrapper:
            setattr(owner, name, patched.original)


def _place(slot: Slot) -> tuple[ModuleType | type, str]:
    """Return the module or class, and the attribute."""
    inside, _, name = slot[1].rpartition(".")
    file = sys.modules[slot[0]]
    return (getattr(file, inside) if inside else file), name


def step_wrapper(original):
    """Wrap `original`, `__call__` of a model class: decode steps of attached models are replayed if possible
    (`patching.steps`)."""

    @wraps(original)
    def __call__(self, *args, **kwargs):
        attachment = vars(self).get(MARK)
        if attachment is None:
            return original(self, *args, **kwargs)
        steps = attachment.steps
        if steps.off:
            out = original(self, *args, **kwargs)
        else:
            with steps.lock:  # while one thread traces, the weights are its placeholders
                step = _step_of(*args, **kwargs)
                out = None if step is None else steps(self, original, *step)
                if out is None:
                    out = original(self, *args, **kwargs)
        for listen in attachment.listeners:
            listen(*args, **kwargs)
        return out

    return __call__


def _step_of(
    inputs=None, cache=None, *args, inputs_embeds=None, logits_to_keep=None, **kwargs
) -> tuple | None:
    """Return tokens and caches of a call with no other arguments; None for other calls. mlx-vlm passes
    `inputs_embeds` of None, and `logits_to_keep` of 1 with one token: these count as absent."""
    if inputs is None or cache is None or args or kwargs or inputs_embeds is not None:
        return None
    if logits_to_keep and inputs.shape[-1] != 1:
        return None
    return inputs, cache


def attention_wrapper(original):
    """Wrap `original`: calls over our views and handles go to our attention."""

    @wraps(original)
    def scaled_dot_product_attention(queries, keys, values, *args, **kwargs):
        if hasattr(type(keys), "attended"):  # from an observer or a dry run
            return keys.attended(queries, values, *args, **kwargs)
        options = dict(zip(PARAMETERS, args, strict=False)) | kwargs if args else kwargs
        if isinstance(keys, View):
            return attend(
                queries, keys, options.get("scale", 1.0), options.get("mask"), options.get("sinks")
            )
        cache: Any = options.get("cache")
        if isinstance(cache, CacheList):
            cache = cache.caches[0]
        if hasattr(type(cache), "queried"):  # an observer of latents
            cache.queried(queries, options["scale"])
        return original(queries, keys, values, *args, **kwargs)

    return scaled_dot_product_attention


# -- Families whose files have attention code of their own: patches that make this code handle our views.
#
# A view without quantized pages passes its arrays to the family's own code, so results stay bit-identical.


def is_plain(view: object) -> TypeGuard[View]:
    """Return whether a view has no quantized pages, so that its arrays equal a plain cache's, and no observer."""
    return isinstance(view, View) and view.plain and not hasattr(type(view), "attended")


# -- mx.fast of a file (plamo2)


class _Functions(ModuleType):
    """A module of MLX with some functions in place of its own."""

    def __init__(self, original: ModuleType, **functions):
        super().__init__(original.__name__, original.__doc__)
        vars(self).update(functions, _original=original)

    def __getattr__(self, name: str):
        return getattr(vars(self)["_original"], name)


def fast_attention(original: ModuleType) -> ModuleType:
    """Wrap a file's `mx`: route `mx.fast.scaled_dot_product_attention` over our views to our attention."""
    fast = _Functions(original.fast, **{NAME: attention_wrapper(getattr(original.fast, NAME))})
    return _Functions(original, fast=fast)


# -- capped scores (gear, gemma2)


def capped(original: Callable) -> Callable:
    """Wrap gear's attention with capped scores."""

    @wraps(original)
    def _softcap_attention(queries, keys, values, scale, softcap, mask):
        if not isinstance(keys, (View, Handle)):
            return original(queries, keys, values, scale, softcap, mask)
        if is_plain(keys):
            return original(queries, *keys.recent, scale, softcap, mask)
        return _capped(queries, keys, scale, mask, softcap)

    return _softcap_attention


def gemma2(original: Callable) -> Callable:
    """Wrap gemma2's attention, a single method: over our caches, the part after projections and RoPE is replaced."""

    @wraps(original)
    def __call__(self, x, mask=None, cache: Any = None):
        if not type(cache).__module__.startswith("mlxkv."):
            return original(self, x, mask, cache)
        offset = cache.offset
        q, k, v = (
            linear(x).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
            for linear, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        q, k = (self.rope(x, offset=offset) for x in (q, k))
        view, values = cache.update_and_fetch(k, v)
        if not isinstance(view, (View, Handle)):  # from a cache that returns plain keys
            return original(self, x, mask, _Updated(offset, (view, values)))
        if is_plain(view):
            return original(self, x, mask, _Updated(offset, view.recent))
        out = _capped(q, view, self.scale, mask, self.attn_logit_softcapping)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    return __call__


@dataclass(frozen=True)
class _Updated:
    """Stand-in for a cache already updated. offset: before the update. pair: all keys and values."""

    offset: int
    pair: tuple[mx.array, mx.array]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.pair


def _capped(queries, keys: View | Handle, scale, mask, softcap: float) -> mx.array:
    if isinstance(keys, Handle) or hasattr(type(keys), "attended"):
        return keys.attended(queries, keys, scale=scale, mask=mask, softcap=softcap)
    return attend(queries, keys, scale, mask, softcap=softcap)


# (Family, attribute): further patches for families with attention code of their own.
OWN_CODE: dict[tuple[str, str], Callable] = {
    ("gear", "_softcap_attention"): capped,
    ("gemma2", f"Attention.{CALL}"): gemma2,
    ("plamo2", "mx"): fast_attention,
}
