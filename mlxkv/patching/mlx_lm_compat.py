"""Every private part of mlx-lm and MLX that mlxkv touches: a function for each.

Nothing else reads or replaces what their authors may rename. `tests/models/test_mlx_lm_compat.py` has a test for each
function, so that it says what a new version has changed. (`patching/patch` patches the attention of families,
which is what `attach` is for; `cache/contract` knows who asks a cache for its bits, and is tested there, too.)

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
    a type that it does not know, and whatever the model's file raises."""
    return import_module("mlx_lm.utils")._get_classes(config)


# -- mlx_lm.models.cache


def register_caches(*classes: type) -> None:
    """Let mlx-lm's `load_prompt_cache` find `classes` by their names, for good: it looks them up in its globals."""
    module = import_module("mlx_lm.models.cache")
    for cls in classes:
        setattr(module, cls.__name__, cls)


def requested_size() -> int | None:
    """Return the `max_kv_size` that mlx-lm's `make_prompt_cache` was given, where that called the function that calls
    this one; else None. mlx-lm hands it to no model's make_cache."""
    caller = sys._getframe(2)
    is_mlx_lm = caller.f_code.co_name == "make_prompt_cache"
    return caller.f_locals.get("max_kv_size") if is_mlx_lm else None


def forbid_merging(caches: Any) -> None:
    """Take the ways into a batch from a list of caches (`CacheList`)."""
    if not hasattr(caches, "batchable"):
        caches.__class__ = _without_merge(type(caches))


@cache
def _without_merge(kind: type) -> type:
    """Return the class of a list of caches without its ways into a batch; its name, which saved files hold, stays."""

    def absent(_):
        raise AttributeError("sequences of this model are read one at a time")

    ways = dict.fromkeys(("merge", "to_batch"), property(absent))
    return type(kind.__name__, (kind,), ways | {"batchable": False})


def ring_index(cache: Any) -> int:
    """Return where a sliding window (`RotatingKVCache`, `BatchRotatingKVCache`) writes its next token."""
    return cache._idx


def set_ring_index(cache: Any, index: int) -> None:
    cache._idx = index


def ring_tokens(cache: Any) -> int:
    """Return how many tokens a `BatchRotatingKVCache` was given, padding included."""
    return cache._offset


def set_ring_tokens(cache: Any, tokens: int) -> None:
    cache._offset = tokens


def pads_right(cache: Any) -> bool:
    """Return whether a `BatchRotatingKVCache` reads prompts that are padded on the right."""
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
    """Have a detokenizer for byte-level vocabularies write zero bytes; mlx-lm takes the letter that stands for one for
    itself. Leaves other detokenizers as they are."""
    if decode := getattr(detokenizer, "_decode_bytes", None):
        detokenizer._decode_bytes = lambda text: decode(text.replace("\u0100", "\0"))


# -- mlx.nn


@contextmanager
def count_modules(made: Callable[[], None]) -> Iterator[None]:
    """Call `made` for each module that is made in this block; what it raises ends the making."""
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
