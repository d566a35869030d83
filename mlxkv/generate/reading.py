"""Feed a model through its cache: a prompt in chunks, later tokens a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy

import mlx.core as mx

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.generate.generation import new_cache
from mlxkv.patching.trees import leaves, put

PREFILL = 512  # tokens of a prompt at once
DECODE = 8  # tokens at once after it; so few that attention reads the codes, as in decoding
STORED = 4096  # tokens to quantize at once from another cache


def prefill(loaded, tokens: Sequence[int]) -> list:
    """Return a new cache, one per layer, that holds `tokens`."""
    cache = new_cache(loaded)
    extend(loaded, cache, tokens)
    return cache


def extend(loaded, cache: list, tokens: Sequence[int]) -> None:
    """Read `tokens` into a cache in chunks, as a prompt is read."""
    for start in range(0, len(tokens), PREFILL):
        loaded.model(mx.array([tokens[start : start + PREFILL]]), cache=cache)
        mx.eval([c.state for c in cache])


def follow(loaded, cache: list, tokens: Sequence[int], step: int = DECODE) -> Iterator[mx.array]:
    """Yield the logits after each of `tokens`, [n, vocabulary] float32 for `step` tokens at a time; the cache grows."""
    for start in range(0, len(tokens), step):
        logits = loaded.model(mx.array([tokens[start : start + step]]), cache=cache)[0]
        logits = logits.astype(mx.float32)
        mx.eval(logits)
        yield logits


def likely(loaded, cache: list, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Return for each token but the first whether it is the likeliest one there, and its negative log likelihood in
    nats, [T - 1] each. The cache grows by all tokens but the last."""
    same, nll, first = [], [], 1
    for logits in follow(loaded, cache, tokens[:-1]):
        true = mx.array(list(tokens[first : first + len(logits)]))
        first += len(logits)
        at_true = mx.take_along_axis(logits, true[:, None], axis=-1)[:, 0]
        nll.append(mx.logsumexp(logits, axis=-1) - at_true)
        same.append(mx.argmax(logits, axis=-1) == true)
        mx.eval(nll[-1], same[-1])
    return mx.concatenate(same), mx.concatenate(nll)


def drops_tokens(cache: list) -> bool:
    """Return whether caches drop tokens of a prompt after it is read."""
    configs = (getattr(layer, "config", None) for layer in cache)
    return any(config is not None and config.keep < 1 for config in configs)


def stored(loaded, tokens: Sequence[int], exact: list) -> list:
    """Return caches of the attached preset with `tokens`: the keys and values are those in `exact`, full-precision
    caches.

    Caches that learn from queries (OjaKV) or do not store plain keys (latents) read the tokens themselves.
    """
    caches = new_cache(loaded)
    if any(getattr(cache, "observes_queries", False) for _, cache in leaves(caches)):
        return prefill(loaded, tokens)
    for (place, new), (_, old) in zip(leaves(caches), leaves(exact), strict=True):
        if type(new) is type(old):
            put(caches, place, deepcopy(old))
        elif isinstance(new, CompressedKVCache):  # in place of a plain KVCache
            for start in range(0, old.offset, STORED):
                part = slice(start, min(start + STORED, old.offset))
                new.update_and_fetch(old.keys[:, :, part], old.values[:, :, part])
                mx.eval(new.arrays())
        else:
            return prefill(loaded, tokens)
    return caches
