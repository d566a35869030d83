"""The name by which models of transformers are handed their cache: `cache` from 5.24 on, `past_key_values` before.

Neither version takes the other's name: 5.24 warns of the old one until it ends. It is asked for once, here.
"""

from __future__ import annotations

import inspect

from transformers import Cache
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
