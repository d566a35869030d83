"""Try the language model of every family of mlx-vlm on compressed caches: `python -m experiments.families.vlm`.

Each is built small, with random weights: which layers are compressed, whether pages that lose nothing give the
plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from experiments.families.found import INT4, Family, Survey, examined
from experiments.families.mlx import LLAMA_4, YARN, finished, greedy
from experiments.families.mlx import OWN as TEXTS
from experiments.families.sizes import LATENT, PLAIN, SMALL, WINDOWS
from mlxkv import console
from mlxkv.loading.attach import attach, detach
from mlxkv.patching.trees import own_caches

MODELS = "mlx_vlm.models"
ROPE = {"rope_theta": 1e4, "rope_type": "default", "type": "default", "partial_rotary_factor": 0.5}
ROPE["mrope_section"] = [2, 3, 3]  # of 8 pairs, half of a head

# Each configuration takes those of its fields.
COMMON = {
    **SMALL,
    **PLAIN,
    **{"layer_types": WINDOWS, "full_attn_idxs": [1, 3], "rope_parameters": ROPE},
    **{"sliding_window": 16, "tie_word_embeddings": True, "use_conv_bias": True},
}
NO_WINDOWS = {"layer_types": ["full_attention"] * 4, "sliding_window": None}
GEMMA4 = {
    **{"num_kv_shared_layers": 2, "global_head_dim": 128, "use_double_wide_mlp": False},
    **{"enable_moe_block": False, "num_experts": None},
}
MINISTRAL = {"rope_parameters": LLAMA_4 | {"type": "default"}}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
# Where a family needs other values than most, and than in mlx-lm.
EXTRA: dict[str, dict] = {
    "afm7": {"hidden_dim": 256, "num_layers": 3},
    "bitnet": NO_WINDOWS,
    "deepseek_v3": LATENT | {"n_routed_experts": None},
    "deepseek_v2": {"rope_scaling": {"type": "default"}},
    "exaone4": {"rope_scaling": {"rope_type": "default"}},
    "minicpm3": {"rope_scaling": YARN | {"type": "longrope"}},
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "llama"},
    "llmjpvl": {"model_type": "qwen3"},
    "multi_modality": {"model_type": "llama"},
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "glm4_moe_lite": LATENT,
    "gpt2": LATENT,
    "granitemoehybrid": {"mamba_conv_bias": True, "position_embedding_type": "rope"},
    "hunyuan": {"cla_share_factor": 1},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl"), {"moe_layer_freq": None}),
    "mamba2": {"n_groups": 1, "time_step_rank": "auto"},
    "ministral3": MINISTRAL,
    "mistral3": MINISTRAL | {"model_type": "ministral3"},
    "nemotron": {"hidden_act": "relu2"},
    "olmo": {"mlp_ratio": 2},
    "solar_open": {"rope_scaling": None},
    "qwen4_exp": {"layer_types": None},
}


DIFFUSION = "writes by diffusion, not one token after another"
UNFIT = {
    "diffusion_gemma": DIFFUSION,
    "llada2_moe": DIFFUSION,
    "nemotron_labs_diffusion": DIFFUSION,
    "phi3small": "MLX dies on a CPU in its own block-sparse attention, on plain caches",
}


def families() -> list[str]:
    """Return the names of mlx-vlm's families: the folders of its models."""
    folder = Path(find_spec(MODELS).submodule_search_locations[0])
    return sorted(file.parent.name for file in folder.glob("*/__init__.py"))


def build(name: str) -> nn.Module:
    """Return the language model of a family with random weights in float32. Raises what its code raises on values
    that nobody chose for it, ValueError where there is none."""
    file = import_module(f"{MODELS}.{name}")
    values = COMMON | {"model_type": name} | TEXTS.get(name, {}) | EXTRA.get(name, {})
    if getattr(file, "ModelConfig", None) is None:
        raise ValueError("no configuration of a language model")
    mx.random.seed(0)
    text = (getattr(file, "TextConfig", None) or file.ModelConfig).from_dict(values)
    model = _language_model(file, text, file.ModelConfig, values)
    return finished(model, _noise)


def _language_model(file, text, whole, values: dict) -> nn.Module:
    """Of a text family by its whole model; of a vision family alone."""
    if not hasattr(file, "VisionConfig"):
        model = file.Model(text)
        if not isinstance(getattr(model, "language_model", None), nn.Module):
            raise ValueError("no language model")
        return model.language_model
    if list(signature(file.LanguageModel).parameters)[1:2] != ["config"]:
        return file.LanguageModel(text)
    config = whole.from_dict(values | {"vision_config": {}, "text_config": values})
    config.text_config, config.vision_config = text, SimpleNamespace(spatial_merge_size=2)
    return file.LanguageModel(text, config)


def _noise(x: mx.array) -> mx.array:
    # Biases and norms start as constants: random ones make every path matter.
    if x.size == 0 or not mx.issubdtype(x.dtype, mx.floating):
        return x
    return x.astype(mx.float32) + 0.02 * mx.random.normal(x.shape)


def _written(model: nn.Module) -> tuple[list[int], np.ndarray]:
    attached = "make_cache" in vars(model)
    return greedy(model, model.make_cache() if attached else own_caches(model))


def family(name: str) -> Family:
    return examined(name, UNFIT, build, _written, attach, detach, INT4)


SURVEY = Survey(
    name="families.vlm",
    library="mlx-vlm",
    what="The language model of every family that can be built",
    plain="run as they are, with a reason",
    skipped="were not compared.",
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family)


if __name__ == "__main__":
    console.run_tool(main)
