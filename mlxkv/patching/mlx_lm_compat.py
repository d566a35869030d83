"""Wrap each private part of mlx-lm and MLX that mlxkv uses in a function.

No other file reads or replaces names that their authors may change. `tests/patching/test_mlx_lm_compat.py` tests each
function, so a failure names what a new version changed. (Exceptions: `patching/patch` patches the attention of
families, the purpose of `attach`; `cache/contract` knows the callers that read a cache's bits, and is tested there
too.)

Importing this module imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

# -- mlx_lm.utils


def model_classes(config: dict) -> tuple[type, type]:
    """Return the classes of the model and of its arguments that mlx-lm chooses for a config.json. Raises ValueError for
    an unknown type, and any error of the model's file."""
    return import_module("mlx_lm.utils")._get_classes(config)


# -- mlx_lm.models.cache


def register_caches(*classes: type) -> None:
    """Let mlx-lm's `load_prompt_cache` find `classes` by name, permanently: it looks them up in its globals."""
    module = import_module("mlx_lm.models.cache")
    for cls in classes:
        setattr(module, cls.__name__, cls)


def requested_size() -> int | None:
    """Return the `max_kv_size` argument of mlx-lm's `make_prompt_cache`, if that called our caller; else None. mlx-lm
    does not pass it to a model's make_cache."""
    caller = sys._getframe(2)
    is_mlx_lm = caller.f_code.co_name == "make_prompt_cache"
    return caller.f_locals.get("max_kv_size") if is_mlx_lm else None


def forbid_merging(caches: Any) -> None:
    """Remove the batching methods of a list of caches (`CacheList`)."""
    if not hasattr(caches, "batchable"):
        caches.__class__ = _without_merge(type(caches))


@cache
def _without_merge(kind: type) -> type:
    """Return a subclass of a list of caches without batching methods, with the same name: saved files contain it."""

    def absent(_):
        raise AttributeError("sequences of this model are read one at a time")

    ways = dict.fromkeys(("merge", "to_batch"), property(absent))
    return type(kind.__name__, (kind,), ways | {"batchable": False})


def ring_index(cache: Any) -> int:
    """Return the index at which a sliding window (`RotatingKVCache`, `BatchRotatingKVCache`) writes its next token."""
    return cache._idx


def set_ring_index(cache: Any, index: int) -> None:
    cache._idx = index


def ring_tokens(cache: Any) -> int:
    """Return how many tokens were written to a `BatchRotatingKVCache`, padding included."""
    return cache._offset


def set_ring_tokens(cache: Any, tokens: int) -> None:
    cache._offset = tokens


def pads_right(cache: Any) -> bool:
    """Return whether a `BatchRotatingKVCache` is reading prompts padded on the right."""
    return cache._lengths is not None


# -- mlx_lm.generate


@contextmanager
def wired(allowed: bool) -> Iterator[None]:
    """Hold back mlx-lm's `mx.set_wired_limit` in this block, unless `allowed`. Under concurrent work on macOS that call
    was followed by three kernel panics within 108 s, and its absence by none in 4.2 hours (ml-explore/mlx#3186)."""
    module: Any = import_module("mlx_lm.generate")  # mlx_lm has a function of this name
    plain = module.maybe_set_recommended_wired_limit
    if not allowed:
        module.maybe_set_recommended_wired_limit = lambda: None
    try:
        yield
    finally:
        module.maybe_set_recommended_wired_limit = plain


def generation_batch(generator: Any) -> Any:
    """Return the batch in which a `BatchGenerator` decodes."""
    return generator._generation_batch


def reading_caches(generator: Any) -> list:
    """Return the caches of the prompts that a `BatchGenerator` reads."""
    return generator._prompt_batch.prompt_cache


def next_tokens(batch: Any) -> Any:
    """Return the tokens [B] that a `GenerationBatch` has drawn and feeds to its next step."""
    return batch._next_tokens


def set_next_tokens(batch: Any, tokens: Any) -> None:
    batch._next_tokens = tokens


# -- mlx_lm.tokenizer_utils


def inner_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of transformers inside mlx-lm's wrapper."""
    return tokenizer._tokenizer


def keep_zero_bytes(detokenizer: Any) -> None:
    """Fix zero bytes in a detokenizer for byte-level vocabularies: mlx-lm prints the letter that encodes one. Leaves
    other detokenizers unchanged."""
    if decode := getattr(detokenizer, "_decode_bytes", None):
        detokenizer._decode_bytes = lambda text: decode(text.replace("\u0100", "\0"))


# -- mlx.nn


@contextmanager
def count_modules(made: Callable[[], None]) -> Iterator[None]:
    """Call `made` for each module constructed in this block; an error of `made` aborts the construction."""
    cls: Any = import_module("mlx.nn").Module
    init = cls.__init__

    def counting(self) -> None:
        made()
        init(self)

    cls.__init__ = counting
    try:
        yield
    finally:
        cls.__init__ = init
