"""Draws of a request with a seed: by a key of its own, so that it can join a batch."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm import server
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc


class Seeded:
    """One row's sampler, log-probabilities [1, V] -> tokens [1]: the chain of mlx-lm's `make_sampler`,
    whose samplers draw from one state for all. After `mx.random.seed(seed)` that one draws the same.

    settings: mlx-lm's SamplingArguments. special: tokens that XTC leaves alone.
    """

    def __init__(self, settings: server.SamplingArguments, seed: int, special: list[int]):
        self._settings, self._special, self._key = settings, special, mx.random.key(seed)

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
            cut = apply_xtc(logprobs, 1.0, s.xtc_threshold, self._special)  # always
            spared = mx.random.uniform(key=self._next_key()) > s.xtc_probability
            logprobs = mx.where(spared, logprobs, cut)
        if s.top_k > 0:
            logprobs = apply_top_k(logprobs, s.top_k)
        return mx.random.categorical(logprobs * (1.0 / s.temperature), key=self._next_key())


def make_sampler(args: server.GenerationArguments, tokenizer):
    """As mlx-lm's `_make_sampler`, where no seed is given or nothing is drawn."""
    if args.seed is None or not args.sampling.temperature:
        return server._make_sampler(args, tokenizer)
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    return Seeded(args.sampling, args.seed, special)
