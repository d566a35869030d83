"""`trial`: whether decode steps of a model can be traced, known before its first token. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.fixed.form import NotYet, Untraceable
from mlxkv.models.compiled.step import Kind, forms_of, grouped
from mlxkv.models.compiled.weights import Assigned, Weights

REPLAYED, BY_PYTHON, LATER = "replayed", "built by Python: ", "known from the first tokens on: "
STEPS = 3  # after the prompt: mlx-lm cuts a window that is too long as it writes the next token


class _Traced(Exception):
    """The trace is there; MLX has nothing to join or to build."""


def trial(model: nn.Module, call: Callable, caches: list, prompt: int) -> str:
    """Return how decode steps over `caches`, which are empty, are made, for reports: REPLAYED, or BY_PYTHON or LATER
    and the reason.

    call: of the model's class. prompt: tokens, enough for caches to seal a page. MLX is lazy: graphs of the prompt
    and of a step are built and thrown away. Whatever the model's code raises becomes a reason.
    """
    tokens = mx.zeros((1, 1), mx.int32)
    for cache in _leaves(caches):
        if isinstance(cache, CompressedKVCache):
            cache.lazy = True
    try:
        _forms(caches)
        call(model, mx.zeros((1, prompt), mx.int32), cache=caches)
        for left in reversed(range(STEPS)):
            try:
                _trace(model, call, tokens, caches)
            except NotYet:
                if not left:
                    raise
                call(model, tokens, cache=caches)
    except _Traced:
        return REPLAYED
    except Untraceable as error:
        return f"{BY_PYTHON}{error}"
    except (NotYet, Assigned) as error:
        return f"{LATER}{error}"
    except Exception as error:  # a foreign model may raise anything at all
        return f"{LATER}a dry run fails ({type(error).__name__})"
    raise AssertionError("a trace neither ends nor fails")


def _leaves(caches: list) -> list:
    return [one for cache in caches for one in getattr(cache, "caches", (cache,))]


def _forms(caches: list) -> list:
    return [form for cache in caches for form in forms_of(cache, 1)]


def _trace(model: nn.Module, call: Callable, tokens: mx.array, caches: list) -> None:
    """Raises _Traced, or why there is no trace."""
    forms = _forms(caches)
    if any(form.emulated for form in forms):
        raise Untraceable("kernels of no GPU")
    weights = Weights(model)
    kind = Kind(weights, call, False)
    trace = kind.run

    def traced(*inputs) -> None:
        trace(*inputs)
        raise _Traced

    kind.run = mx.compile(traced)
    places, values, advances = grouped(forms)
    kind(tokens, weights.arrays(), forms, caches, places, values, advances)
