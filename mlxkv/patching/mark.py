"""Record on a model what `attach` changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.latent import IndexedLatentKVCache, LatentKVCache
from mlxkv.formats.calibration.artifact import Calibration
from mlxkv.patching import mlx_lm_compat
from mlxkv.patching import patch as patching
from mlxkv.patching.patch import Slot
from mlxkv.patching.probe import ProbedShape
from mlxkv.patching.steps import Steps
from mlxkv.patching.trees import MAKE, MARK, Place, default_caches, leaves, own_caches, put

# -- Models that process one sequence at a time, and how their caches tell hosts.
#
# A model's code makes one mask for all layers of a kind, from the first of their caches. In a batch, mlx-lm's own
# caches are padded on the left and ours are not, so no mask fits both. Hosts check whether a cache has `merge`
# (mlx-lm) or `to_batch` (mlx-vlm), and serve sequences one by one if it has neither.


def is_batchable(caches: list, compressed: Container[Place]) -> bool:
    """Return False if only some of the model's own `caches` of one kind are to be compressed."""
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for place, member in leaves(caches):
        kinds[place in compressed].add(type(member).__name__)
    return not kinds[True] & kinds[False]


def register_caches() -> None:
    """Let mlx-lm's `load_prompt_cache` find our classes of caches."""
    mlx_lm_compat.register_caches(
        CompressedKVCache, AdaptiveKVCache, LatentKVCache, IndexedLatentKVCache
    )


NewCache = partial  # (class, config, layer maps, plan): called, it makes a compressed cache


@dataclass(frozen=True, eq=False)
class Attachment:
    """The changes made by `attach`; it replaces `make_cache` of `model`.

    slots: from `patch`. new: constructors of the caches at compressed places. original: the instance's own
    make_cache, if it had one. batchable: False if sequences are read one at a time (`is_batchable`). steps: the model's
    traced decode steps. listeners: called with the arguments of each call of the model, after it. Deep and unpickled
    copies of a model are attached too.
    """

    model: nn.Module = field(repr=False)
    slots: list[Slot]
    new: Mapping[Place, NewCache]
    original: Callable[[], list] | None
    batchable: bool = True
    steps: Steps = field(default_factory=Steps, repr=False)
    listeners: list[Callable] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        register_caches()

    def __call__(self) -> list:
        """Return the model's own caches, with compressed ones at their places."""
        if (size := mlx_lm_compat.requested_size()) is not None:
            warnings.warn(
                "[attach] max_kv_size has no effect on an attached model, whose compressed caches keep every "
                f"token; got {size}; leave it out, or detach the model",
                stacklevel=3,
            )
        caches = self.plain_caches()
        for place, new in self.new.items():
            cache = new()
            put(caches, place, cache)
            if not self.batchable:
                cache.batchable = False
                if len(place) > 1:
                    mlx_lm_compat.forbid_merging(caches[place[0]])
        return caches

    def plain_caches(self) -> list:
        """Return the caches that the model made before `attach`."""
        inherited = getattr(type(self.model), MAKE, None)
        make = self.original or (inherited and inherited.__get__(self.model))
        return make() if make else default_caches(self.model)

    def __deepcopy__(self, memo) -> Attachment:
        model, make = deepcopy(self.model, memo), deepcopy(self.original, memo)
        return Attachment(model, patching.patch_slots(self.slots), self.new, make, self.batchable)

    def __reduce__(self):
        # Kernels are chosen again when a copy is unpickled: they depend on the machine.
        kinds = {p: (new.func, *new.args[:2]) for p, new in self.new.items()}
        return _attached, (self.model, self.slots, kinds, self.original, not self.batchable)


def _attached(
    model: nn.Module, slots: list[Slot], kinds: dict, make, is_single: bool
) -> Attachment:
    """Unpickle. is_single: not batchable."""
    new = {p: partial(*k) for p, k in kinds.items()}
    return Attachment(model, patching.patch_slots(slots), new, make, not is_single)


def mark(model: nn.Module, slots: list[Slot], new: Mapping[Place, NewCache]) -> None:
    """Replace `make_cache` of `model` by one with `new` caches, and record the original."""
    batchable = is_batchable(own_caches(model), new)
    attachment = Attachment(model, slots, new, vars(model).get(MAKE), batchable)
    setattr(model, MARK, attachment)
    setattr(model, MAKE, attachment)


def steps_of(model: nn.Module) -> Steps | None:
    """Return the decode steps of an attached model, or None."""
    attachment = vars(model).get(MARK)
    return None if attachment is None else attachment.steps


def unmark(model: nn.Module) -> bool:
    """Undo `mark` and `patch`. Returns whether the model was attached.

    A make_cache set or deleted since then is left so. A shallow copy shares its slots with the attached model, which
    stays attached.
    """
    attachment = vars(model).get(MARK)
    if attachment is None:
        return False
    delattr(model, MARK)
    if vars(model).get(MAKE) is attachment:
        delattr(model, MAKE)
        if attachment.original is not None:
            setattr(model, MAKE, attachment.original)
    if attachment.model is model:
        patching.unpatch(attachment.slots)
    return True


def forget_steps(model: nn.Module) -> None:
    """Drop the traced steps of `model`, if it is attached. Call it before a thread ends (`Steps.forget`)."""
    if (steps := steps_of(model)) is not None:
        steps.forget()


# -- where a model comes from, and the names of its caches in calibrations


_ORIGIN = "_mlxkv_origin"


@dataclass(frozen=True)
class Origin:
    """The source of a loaded model.

    folder: where a calibration of it may lie: its own, or that of its adapter. context: the longest context it was made
    for, in tokens, or None. calibration: as passed to `load`, or None. chosen: why its preset was, if mlxkv chose it.
    """

    name: str
    fingerprint: str
    folder: Path
    tokenizer: Any
    context: int | None = None
    calibration: Calibration | None = None
    chosen: str = ""


def set_origin(model: nn.Module, origin: Origin) -> None:
    """Record on `model` where it comes from; `attach` reads it."""
    setattr(model, _ORIGIN, origin)


def origin_of(model: nn.Module) -> Origin | None:
    """Return the origin that `load` recorded, or None for a model from elsewhere."""
    return vars(model).get(_ORIGIN)


def layer_name(place: Place) -> str:
    """Return the name of a cache in calibrations: (3,) -> "3", (3, 1) -> "3.1"."""
    return ".".join(map(str, place))


def sizes(shapes: Mapping[Place, ProbedShape]) -> dict[str, tuple[int, int, int]]:
    """Return (kv heads, key dim, value dim) of each cache, by its name in calibrations."""
    return {layer_name(p): (s.heads, s.key_dim, s.value_dim) for p, s in shapes.items()}
