"""Models to time: true shapes with random weights, or what `load` finds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxkv.artifact import Calibration
from mlxkv.calibrate import calibrate
from mlxkv.errors import UserError

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
GROUP = 64  # of quantised weights, as mlx-lm's converter makes them
_QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
# What decides shapes and time in the config.json of each.
CONFIGS: dict[str, dict] = {
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "num_hidden_layers": 26,
        "hidden_size": 1152,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 32768,
    },
    "qwen2.5-1.5b": _QWEN
    | {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
    },
    "qwen3-4b": _QWEN
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "max_position_embeddings": 40960,
    },
    "qwen3-8b": _QWEN
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Subject:
    """A model to time. weights: "random" or "loaded"."""

    model: nn.Module
    config: dict
    weights: str
    dtype: mx.Dtype

    @cached_property
    def calibration(self) -> Calibration | None:
        """For calibrated presets: random rotations where the weights are random."""
        return calibrate(self.model, target="random") if self.weights == "random" else None


def subject(name: str, dtype: mx.Dtype | None, default: mx.Dtype, bits: int | None) -> Subject:
    """The model `name`: one of CONFIGS, a folder (random weights if it holds none), or any name
    that `load` knows."""
    config = CONFIGS.get(name) or _bare_config(Path(name))
    if config is not None:
        return Subject(_random(config, dtype or default, bits), config, "random", dtype or default)
    if bits is not None:
        raise UserError(
            f"[--bits] quantises random weights; got --model {name}; choose --model from "
            f"{', '.join(CONFIGS)}, or leave --bits out"
        )
    from mlxkv.models import load

    loaded = load(name, "fp16", dtype=dtype and str(dtype).split(".")[-1])
    return Subject(loaded.model, loaded.config, "loaded", loaded.dtype)


def _bare_config(folder: Path) -> dict | None:
    """The config.json of a folder without weights."""
    file = folder / "config.json"
    if not file.is_file() or any(folder.glob("*.safetensors")):
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        import_module(f"mlx_lm.models.{config['model_type']}")
    except (ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(
            f"[--model] no config.json of a model that mlx-lm knows ({type(error).__name__}); got "
            f"{folder}; choose another folder"
        ) from None
    return config


def _random(config: dict, dtype: mx.Dtype, bits: int | None) -> nn.Module:
    """MLX's own initialisation in `dtype`, and quantised as mlx-lm does."""
    mx.random.seed(0)
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(config))
    if config.get("tie_word_embeddings") and "lm_head" in model:
        # The family ties its head when it finds none in a file.
        found = tree_flatten(model.parameters())
        model.sanitize({name: x for name, x in found if name != "lm_head.weight"})
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, GROUP, bits)
    model.eval()
    for _, x in tree_flatten(model.parameters()):
        mx.eval(x)  # one by one: the float32 that each is made from goes at once
    mx.clear_cache()
    return model
