"""What differs between versions of transformers, and what is private there: the name by which models are handed their
cache, and the share of a process in a model that is spread over several by kv heads (tensor parallelism).

The name is `cache` from 5.24 on, `past_key_values` before. Neither version takes the other's: 5.24 warns of the old one
until it ends.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from transformers import Cache, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from mlxkv.errors import UserError

NAMES = ("cache", "past_key_values")
_KNOWN = inspect.signature(vars(GenerationMixin)["prepare_inputs_for_generation"]).parameters
NAME = next(name for name in NAMES if name in _KNOWN)


def handed(cache: Cache) -> dict[str, Cache]:
    """Return the keyword argument of a call of a model, or of its `generate`: `model(ids, **handed(cache))`."""
    return {NAME: cache}


def cache_of(output) -> Cache | None:
    """Return the cache in what a model returns, or `generate` with `return_dict_in_generate=True`."""
    return getattr(output, NAME)


def renamed(options: dict) -> Cache | None:
    """Give a cache in the options of a call, by either name, the one of this version; return it, or None.

    Raises UserError for two caches.
    """
    caches = [x for x in (options.pop(name, None) for name in NAMES) if x is not None]
    if len(caches) > 1:
        raise UserError(
            "[generate] a model reads one cache; got cache and past_key_values; leave one of them out"
        )
    if not caches:
        return None
    options |= handed(caches[0])
    return caches[0]


@dataclass(frozen=True)
class Share:
    """The kv heads of this process: the `rank`-th of `size` equal shares."""

    rank: int = 0
    size: int = 1


def share_of(model: PreTrainedModel) -> Share:
    """Return the share of this process; the whole of a model in one process."""
    size = getattr(model, "_tp_size", None) or 1
    if size == 1:
        return Share()
    mesh = model._device_mesh
    assert mesh is not None  # of a model in several processes
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return Share(mesh.get_local_rank(), size)


def check_one_process(model: PreTrainedModel, command: str, action: str) -> None:
    """Raise UserError for a model in several processes."""
    if (size := share_of(model).size) > 1:
        raise UserError(
            f"[{command}] {action} in one process only; got a model spread over {size}; load it "
            "without tp_size"
        )
