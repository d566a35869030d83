"""Read a prompt exactly, then read on through what an arm stores of it, in every layer of full attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

SINK, RECENT, PAGE = 64, 64, 128  # tokens; PAGE: of codes, and a multiple of ranked pages
CHUNK = 512
ASKING = 64  # last queries of the prompt, whose attention votes for tokens

Attend = Callable[["Memory", mx.array, mx.array, mx.array, mx.array, float], mx.array]


class Memory:
    """Keys and values of one layer [B, G, T, D], of which a caller of mlx-lm sees everything.

    arm: attends in place of the model's own attention, or None. memo: what arms derive from the prompt. window:
    of a sliding layer, or None.
    """

    def __init__(self, index: int, arm: Attend | None = None):
        self.index, self.arm, self.window = index, arm, None
        self.keys = self.values = self.queries = None
        self.prompt: tuple[mx.array, mx.array] | None = None  # keys and values, once it is read
        self.memo: dict = {}

    @property
    def offset(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def state(self):
        return self.keys, self.values

    @property
    def span(self) -> tuple[int, int]:
        """Where the prompt is stored in pages: (first, stop)."""
        return SINK, SINK + max(0, self.prompt[0].shape[2] - SINK - RECENT) // PAGE * PAGE

    def pages(self, side: int) -> mx.array:
        """Return keys (0) or values (1) of the prompt's pages, exact, [B, G, N, D] float32."""
        start, stop = self.span
        return self.prompt[side][:, :, start:stop].astype(mx.float32)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None):
        return create_causal_mask(count, self.offset, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None:
            keys, values = (
                mx.concatenate([mx.broadcast_to(old, (new.shape[0], *old.shape[1:])), new], axis=2)
                for old, new in ((self.keys, keys), (self.values, values))
            )
        self.keys, self.values = keys, values
        return keys, values

    def fork(self, arm: Attend | None) -> Memory:
        """Return a memory that reads on from here, with the same memo."""
        new = Memory(self.index, arm)
        new.window, new.keys, new.values, new.queries = (
            self.window,
            self.keys,
            self.values,
            self.queries,
        )
        new.memo, new.prompt = self.memo, self.prompt
        return new


@contextmanager
def through(model) -> Iterator[None]:
    """Let the attention calls of `model` (of mlx-lm) ask the memory's arm."""
    module = sys.modules[type(model.layers[0].self_attn).__module__]
    own = module.scaled_dot_product_attention

    def attention(queries, keys, values, cache=None, scale=1.0, mask=None, **more):
        if not isinstance(cache, Memory):
            return own(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)
        if cache.arm is not None:
            return cache.arm(cache, queries, keys, values, mask, scale).astype(queries.dtype)
        cache.queries = queries[:, :, -ASKING:]
        return own(queries, keys, values, cache=None, scale=scale, mask=mask)

    module.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        module.scaled_dot_product_attention = own


def prefill(loaded, tokens: Sequence[Sequence[int]]) -> list[Memory]:
    """Read prompts of one length, [B, T]."""
    whole = mx.array(tokens, dtype=mx.int32)
    plain = loaded.model.make_cache() if hasattr(loaded.model, "make_cache") else None
    found = [Memory(i) for i in range(len(loaded.model.layers))]
    for memory, one in zip(found, plain or found, strict=True):
        memory.window = getattr(one, "max_size", None)
    with through(loaded.model):
        for start in range(0, whole.shape[1], CHUNK):
            loaded.model(whole[:, start : start + CHUNK], cache=found)
            mx.eval([memory.state for memory in found])
    for memory in found:
        memory.prompt = memory.state
    return found


def read_on(loaded, prompt: Sequence[Memory], tokens, arm: Attend) -> mx.array:
    """Return log probabilities [B, T, vocabulary] after each of `tokens` [B, T], all at once: every query reads the
    pages of the prompt through `arm`, and the new tokens exactly. The prompt stays as it was."""
    caches = [one.fork(None if one.window else arm) for one in prompt]
    with through(loaded.model):
        logits = loaded.model(mx.array(tokens, dtype=mx.int32), cache=caches).astype(mx.float32)
    found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(found)
    return found
