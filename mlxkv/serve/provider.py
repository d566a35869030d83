"""The model of the server, and the command line that mlx-lm's server would have read."""

from __future__ import annotations

from argparse import Namespace

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.generate import prefill_step
from mlxkv.models import load
from mlxkv.models.layers import left_out
from mlxkv.models.loader import Loaded
from mlxkv.serve.options import Options


class Provider:
    """The one model, where mlx-lm's `ModelProvider` has any that a request names."""

    def __init__(self, options: Options, group: mx.distributed.Group | None = None):
        self.options, self.group = options, group
        self.cli_args = _arguments(options)
        self.loaded: Loaded | None = None
        self.model = self.tokenizer = self.processor = self.draft_model = None
        self.model_key = "the model"
        self.is_batchable = False

    def load_default(self) -> str:
        """In the generation thread: arrays are computed where they were made. The model's fingerprint."""
        o = self.options
        loaded = load(o.model, o.kv, o.kv_strict, o.dtype, o.calibration, o.fold, self.group)
        self.loaded, self.model, self.tokenizer = loaded, loaded.model, loaded.tokenizer
        mixed = any(r.compressed for r in loaded.layers) and left_out(loaded.layers)
        caches = make_prompt_cache(self.model)
        # Masks of one kind of batched cache do not fit the other: such a model runs one by one.
        self.is_batchable = not mixed and all(hasattr(cache, "merge") for cache in caches)
        return loaded.fingerprint

    def load(self, model, adapter=None, draft=None):
        """The model, whatever name: names were checked before."""
        return self.model, self.tokenizer

    def reset(self) -> None:
        """The thread ends (mlx-lm 0.32)."""
        self.model = self.tokenizer = None


def _arguments(options: Options) -> Namespace:
    """What mlx-lm's server reads of its own command line, both ends of the pinned range."""
    return Namespace(
        **{"model": None, "adapter_path": None, "draft_model": None, "trust_remote_code": False},
        **{"num_draft_tokens": 0, "temp": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        **{"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 0, "pipeline": False},
        **{"chat_template": "", "use_default_chat_template": False, "chat_template_args": {}},
        max_tokens=options.max_tokens,
        decode_concurrency=options.batch,
        prompt_concurrency=options.prefill_batch,
        prefill_step_size=options.prefill_step or prefill_step(),
        prompt_cache_size=None,
        prompt_cache_bytes=None,
        allowed_origins=list(options.origins),
    )
