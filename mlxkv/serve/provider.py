"""What mlx-lm's generation loop asks for: the model, settings, and a sampler for each request."""

from __future__ import annotations

from argparse import Namespace

import mlx.core as mx
from mlx_lm import server
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from mlxkv.models import load, warm_up
from mlxkv.models.generate import prefill_step
from mlxkv.models.loader import Loaded
from mlxkv.serve.options import ServeOptions


class Provider:
    """Stands where mlx-lm has a `ModelProvider`, but has one model, whatever a request names."""

    def __init__(self, options: ServeOptions, group: mx.distributed.Group | None = None):
        self.options, self.group = options, group
        self.cli_args = _arguments(options)
        self.loaded: Loaded | None = None
        self.model = self.tokenizer = self.processor = self.draft_model = None
        self.model_key = "the model"
        self.is_batchable = False

    def load_default(self) -> str:
        """Load the model, build what decoding needs, and return the model's fingerprint. For the generation
        thread, where it runs."""
        o = self.options
        given = o.kv, o.kv_strict, o.dtype, o.calibration, o.fold, self.group
        loaded = load(o.model, *given, weights=o.weights)
        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        warm_up(loaded)
        caches = make_prompt_cache(self.model)
        self.is_batchable = all(hasattr(c, "merge") for c in caches)
        return loaded.fingerprint

    def load(self, model, adapter=None, draft=None):
        """The model and its tokenizer: names were checked before."""
        return self.model, self.tokenizer

    def reset(self) -> None:
        """Forget the model: mlx-lm's thread ends (0.32)."""
        self.model = self.tokenizer = None


def _arguments(options: ServeOptions) -> Namespace:
    """The command line that mlx-lm's server reads, at both ends of the pinned range."""
    return Namespace(
        decode_concurrency=options.batch,
        prompt_concurrency=options.prefill_batch,
        prefill_step_size=options.prefill_step or prefill_step(),
        prompt_cache_bytes=None,
        chat_template_args=options.template,
        allowed_origins=list(options.origins),
        kv_bits=None,
        kv_group_size=64,
        quantized_kv_start=0,
    )


class Seeded:
    """The sampler of a request with a seed: log-probabilities [1, V] -> tokens [1].

    The chain of mlx-lm's `make_sampler`, but with a key of its own, where mlx-lm draws from one state
    for all requests: so it can join a batch. Draws what mlx-lm draws after `mx.random.seed(seed)`.
    special: tokens that XTC leaves alone.
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
            cut = apply_xtc(logprobs, 1.0, s.xtc_threshold, self._special)  # cuts always
            spared = mx.random.uniform(key=self._next_key()) > s.xtc_probability
            logprobs = mx.where(spared, logprobs, cut)
        if s.top_k > 0:
            logprobs = apply_top_k(logprobs, s.top_k)
        return mx.random.categorical(logprobs * (1.0 / s.temperature), key=self._next_key())


def make_sampler(args: server.GenerationArguments, tokenizer):
    """mlx-lm's `_make_sampler`, but `Seeded` for draws with a seed."""
    if args.seed is None or not args.sampling.temperature:
        return server._make_sampler(args, tokenizer)
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    return Seeded(args.sampling, args.seed, special)
