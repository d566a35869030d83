"""Caches that have read tokens, and the memory of a server for them."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from random_models import tokens

from mlxkv.serve.memory import Memory, shapes_of

CHUNK = 32  # tokens of a prompt that are read at once


def read(model, count: int) -> list:
    """Caches that hold `count` tokens."""
    caches = make_prompt_cache(model)
    for start in range(0, count, CHUNK):
        model(tokens(count)[None, start : start + CHUNK], cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def memory_of(model, bound: int = 1 << 40, batched: bool = False) -> Memory:
    return Memory(bound, shapes_of(read(model, 1)), CHUNK, batched=batched)


def maker(loaded):
    """Makes empty caches."""
    return lambda: make_prompt_cache(loaded.model)
