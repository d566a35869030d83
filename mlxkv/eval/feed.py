"""Feed a model through its cache, the way a chat does."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx

from mlxkv.models.generate import new_cache

PREFILL = 512  # tokens of a prompt at once
DECODE = 8  # tokens at once after it; so few that attention reads the codes, as in decoding


def prefill(loaded, tokens: Sequence[int]) -> list:
    """Return a new cache that holds `tokens`."""
    cache = new_cache(loaded)
    extend(loaded, cache, tokens)
    return cache


def extend(loaded, cache: list, tokens: Sequence[int], chunk: int = PREFILL) -> None:
    """Read `tokens` into a cache in chunks, as a prompt is read."""
    for start in range(0, len(tokens), chunk):
        loaded.model(mx.array(tokens[start : start + chunk])[None], cache=cache)
        mx.eval([c.state for c in cache])


def log_probabilities(loaded, cache: list, tokens: Sequence[int]) -> mx.array:
    """Return log probabilities after each of `tokens`, [T, vocabulary] float32, and extend the cache."""
    parts = []
    for start in range(0, len(tokens), DECODE):
        logits = loaded.model(mx.array(tokens[start : start + DECODE])[None], cache=cache)[0]
        logits = logits.astype(mx.float32)
        parts.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def selects(cache: list) -> bool:
    """Return whether caches drop tokens of a prompt after it is read."""
    configs = (getattr(layer, "config", None) for layer in cache)
    return any(config is not None and config.keep < 1 for config in configs)


def branch(cache: list) -> list:
    """Return a copy of a cache, to ask a question without changing the original."""
    return copy.deepcopy(cache)


def stored(loaded, cache: list) -> int:
    """Return the allocated bytes of the layers that grow with the context. Sliding windows are left
    out: they are the same for every preset."""
    return stored_by(loaded.layers, cache)


def stored_by(reports: list, cache: list) -> int:
    """Return the same as `stored`, from the reports of `attach`."""
    return sum(cache[index].nbytes for index in {r.index for r in reports if r.grows})
