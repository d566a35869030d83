"""How the next token of a reply is drawn, and what changes its logits before that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_logits_processors,
    make_sampler,
)

from mlxkv.serve.request import Request

GREEDY = make_sampler(0.0)  # one for all requests: a batch of them is drawn at once


def sampler_of(request: Request, tokenizer: Any) -> Callable[[mx.array], mx.array]:
    """Return the sampler of a request: log-probabilities [B, V] -> tokens [B]; B is 1 where a seed was given."""
    if not request.temperature:
        return GREEDY
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    if request.seed is not None:
        return Seeded(request, special)
    return make_sampler(
        request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        xtc_probability=request.xtc_probability,
        xtc_threshold=request.xtc_threshold,
        xtc_special_tokens=special,
    )


def processors_of(request: Request) -> list[Callable[[mx.array, mx.array], mx.array]]:
    """Biases and penalties of a request: (tokens [N], logits [1, V]) -> logits [1, V]."""
    return make_logits_processors(
        request.logit_bias,
        request.repetition_penalty,
        request.repetition_context_size,
        request.presence_penalty,
        request.presence_context_size,
        request.frequency_penalty,
        request.frequency_context_size,
    )


class Seeded:
    """The sampler of a request with a seed: log-probabilities [1, V] -> tokens [1].

    The chain of mlx-lm's `make_sampler`, but with a key of its own, where mlx-lm draws from one state
    for all requests: so it can join a batch. Draws what mlx-lm draws after `mx.random.seed(seed)`.
    special: tokens that XTC leaves alone.
    """

    def __init__(self, settings: Request, special: list[int]):
        assert settings.seed is not None
        self._settings, self._special = settings, special
        self._key = mx.random.key(settings.seed)

    def _next_key(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key

    def __call__(self, logprobs: mx.array) -> mx.array:
        s = self._settings
        if 0 < s.top_p < 1:
            logprobs = apply_top_p(logprobs, s.top_p)
        if s.min_p:
            logprobs = apply_min_p(logprobs, s.min_p)
        if s.xtc_probability > 0:
            cut = apply_xtc(logprobs, 1.0, s.xtc_threshold, self._special)  # cuts always
            spared = mx.random.uniform(key=self._next_key()) > s.xtc_probability
            logprobs = mx.where(spared, logprobs, cut)
        if s.top_k > 0:
            logprobs = apply_top_k(logprobs, s.top_k)
        return mx.random.categorical(logprobs * (1.0 / s.temperature), key=self._next_key())
