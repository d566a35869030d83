"""Record on a model what `attach` changed, and make the model's own caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlxkv.models.hooks.rebind import Slot

_MARK = "_mlxkv_attachment"
_MAKE = "make_cache"


@dataclass(frozen=True)
class Attachment:
    """What `attach` changed. slots: of `bind`. before: the instance's own make_cache, if it had one."""

    slots: list[Slot]
    before: Callable[[], list] | None


def mark(model: nn.Module, slots: list[Slot], make_cache: Callable[[], list]) -> None:
    """Give `model` a new `make_cache` and record what was there."""
    setattr(model, _MARK, Attachment(slots, vars(model).get(_MAKE)))
    setattr(model, _MAKE, make_cache)


def unmark(model: nn.Module) -> Attachment | None:
    """Undo `mark`. Returns what it recorded, or None for a model that is not attached."""
    attachment = vars(model).get(_MARK)
    if attachment is None:
        return None
    delattr(model, _MARK)
    delattr(model, _MAKE)
    if attachment.before is not None:
        setattr(model, _MAKE, attachment.before)
    return attachment


def own_make_cache(model: nn.Module) -> Callable[[], list]:
    """The function by which the model makes its own caches, attached or not."""
    attachment = vars(model).get(_MARK)
    if attachment is None:
        make = getattr(model, _MAKE, None)
    else:
        inherited = getattr(type(model), _MAKE, None)
        make = attachment.before or (inherited and inherited.__get__(model))
    return make or (lambda: [KVCache() for _ in model.layers])
