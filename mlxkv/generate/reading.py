"""Feed a model through its cache: a prompt in chunks, later tokens a few at a time.

Tokens are a sequence of T, or of B texts of one length, [B, T], which are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy

import mlx.core as mx

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.generate.generation import new_cache
from mlxkv.patching.trees import leaves, put

PREFILL = 512  # tokens of a prompt at once
DECODE = 8  # tokens at once after it; so few that attention reads the codes, as in decoding
STORED = 4096  # tokens to quantize at once from another cache
Tokens = Sequence[int] | mx.array


def prefill(loaded, tokens: Tokens, progress: Callable[[int], None] | None = None) -> list:
    """Return a new cache, one per layer, that holds `tokens`."""
    cache = new_cache(loaded)
    extend(loaded, cache, tokens, progress)
    return cache


def extend(
    loaded, cache: list, tokens: Tokens, progress: Callable[[int], None] | None = None
) -> None:
    """Read `tokens` into a cache in chunks, as a prompt is read. progress: called with the tokens of each chunk."""
    rows = _rows(tokens)
    for start in range(0, rows.shape[1], PREFILL):
        part = rows[:, start : start + PREFILL]
        loaded.model(part, cache=cache)
        mx.eval([c.state for c in cache])
        if progress:
            progress(part.size)


def follow(loaded, cache: list, tokens: Tokens, step: int = DECODE) -> Iterator[mx.array]:
    """Yield the logits after each of `tokens`, [n, vocabulary] float32 for `step` tokens at a time, of B texts [B, n,
    vocabulary]; the cache grows."""
    rows = _rows(tokens)
    for start in range(0, rows.shape[1], step):
        logits = loaded.model(rows[:, start : start + step], cache=cache).astype(mx.float32)
        mx.eval(logits)
        yield logits if isinstance(tokens, mx.array) and tokens.ndim == 2 else logits[0]


def _rows(tokens: Tokens) -> mx.array:
    """Return tokens as [B, T]."""
    out = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
    return out if out.ndim == 2 else out[None]


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


def stored(loaded, tokens: Tokens, exact: list) -> list:
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
