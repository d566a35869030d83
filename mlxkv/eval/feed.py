"""Feed a model through its cache, the way a chat does."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxkv.models.generate import new_cache

PREFILL = 512  # tokens of a prompt at once
DECODE = 8  # tokens at once after it; so few that attention reads the codes, as in decoding


def prefill(loaded, tokens: Sequence[int] | mx.array) -> list:
    """Return a new cache that holds `tokens`, or [B, T] of them: B sequences of one length."""
    cache = new_cache(loaded)
    extend(loaded, cache, tokens)
    return cache


def extend(loaded, cache: list, tokens: Sequence[int] | mx.array) -> None:
    """Read `tokens` into a cache in chunks, as a prompt is read."""
    tokens = _batch(tokens)
    for start in range(0, tokens.shape[1], PREFILL):
        loaded.model(tokens[:, start : start + PREFILL], cache=cache)
        mx.eval([c.state for c in cache])


def log_probabilities(loaded, cache: list, tokens: Sequence[int] | mx.array) -> mx.array:
    """Return log probabilities after each of `tokens`, [T, vocabulary] float32, or [B, T, vocabulary] where
    tokens are [B, T], and extend the cache."""
    parts, batch = [], _batch(tokens)
    for start in range(0, batch.shape[1], DECODE):
        logits = loaded.model(batch[:, start : start + DECODE], cache=cache).astype(mx.float32)
        parts.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(parts[-1])
    logs = mx.concatenate(parts, axis=1)
    return logs if isinstance(tokens, mx.array) and tokens.ndim == 2 else logs[0]


def _batch(tokens: Sequence[int] | mx.array) -> mx.array:
    """[T] -> [1, T]; [B, T] as it is."""
    ids = tokens if isinstance(tokens, mx.array) else list(tokens)
    batch = mx.array(ids, dtype=mx.int32)
    return batch if batch.ndim == 2 else batch[None]


def selects(cache: list) -> bool:
    """Return whether caches drop tokens of a prompt after it is read."""
    configs = (getattr(layer, "config", None) for layer in cache)
    return any(config is not None and config.keep < 1 for config in configs)
