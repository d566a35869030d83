"""Read a context once in full precision, then go on from it with each preset's cache.

Full precision's keys and values of the context are put into a preset's empty cache, which encodes them; what follows
is read eight tokens at a time through what is stored. So all presets have the same context and share its prefill.
Caches that learn from queries (OjaKV) see none there: they read the context themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.eval import feed
from mlxkv.models.generate import new_cache

CHUNK = 4096  # tokens that are encoded at once


@dataclass
class Context:
    """tokens: [B, T], context and what follows. length: tokens of the context. cache: full precision's, after
    them; only to be copied."""

    tokens: mx.array
    length: int
    cache: list

    @classmethod
    def read(cls, loaded, texts: Sequence[Sequence[int]], length: int) -> Context:
        """Read texts of one length. Full precision must be attached to `loaded`."""
        tokens = mx.array(texts, dtype=mx.int32)
        return cls(tokens, length, feed.prefill(loaded, tokens[:, :length]))

    def stored(self, loaded) -> list:
        """Return caches of the attached preset that hold the context."""
        caches = new_cache(loaded)
        if any(getattr(cache, "observes_queries", False) for cache in caches):
            return feed.prefill(loaded, self.tokens[:, : self.length])
        out = []
        for new, old in zip(caches, self.cache, strict=True):
            if type(new) is type(old):
                out.append(deepcopy(old))
            elif isinstance(new, CompressedKVCache) and isinstance(old, KVCache):
                out.append(_filled(new, old))
            else:  # of a kind that takes no plain keys, such as latents
                return feed.prefill(loaded, self.tokens[:, : self.length])
        return out

    def following(self, loaded, cache: list) -> Iterator[tuple[slice, mx.array]]:
        """Yield logits after each token behind the context but the last, a few at a time: their places behind the
        context, and [B, n, vocabulary]."""
        step, end = feed.DECODE, self.tokens.shape[1] - 1
        for start in range(self.length, end, step):
            stop = min(start + step, end)
            logits = loaded.model(self.tokens[:, start:stop], cache=cache)
            yield slice(start - self.length, stop - self.length), logits.astype(mx.float32)


def _filled(new: CompressedKVCache, old: KVCache) -> CompressedKVCache:
    for start in range(0, old.offset, CHUNK):
        part = slice(start, min(start + CHUNK, old.offset))
        new.update_and_fetch(old.keys[:, :, part], old.values[:, :, part])
        mx.eval(new.arrays())
    return new


def logits(loaded, context: Context, cache: list) -> mx.array:
    """Return all logits behind the context, [B, T, vocabulary] float32, in the type of the model's head."""
    parts = []
    for _, part in context.following(loaded, cache):
        mx.eval(part)
        parts.append(part)
    return mx.concatenate(parts, axis=1)


def likely(loaded, context: Context, cache: list) -> tuple[mx.array, mx.array]:
    """Return for each token behind the context but the first whether it is the likeliest, [B, T], and its negative
    log likelihood."""
    same, nll = [], []
    for place, part in context.following(loaded, cache):
        true = context.tokens[:, context.length + place.start + 1 : context.length + place.stop + 1]
        log = part - mx.logsumexp(part, axis=-1, keepdims=True)
        nll.append(-mx.take_along_axis(log, true[..., None], axis=-1)[..., 0])
        same.append(mx.argmax(part, axis=-1) == true)
        mx.eval(same[-1], nll[-1])
    return mx.concatenate(same, axis=1), mx.concatenate(nll, axis=1)
