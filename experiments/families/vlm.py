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
from mlx.utils import tree_flatten, tree_map

from experiments.families.found import INT4, NEAR, NEW, PROMPT, Family, Survey, examined
from experiments.families.sizes import PLAIN, named, sizes
from mlxkv import console
from mlxkv.loading.attach import attach, detach
from mlxkv.patching.trees import own_caches

VOCABULARY = 64
MOST = 40_000_000  # numbers in the weights of one
MODELS = "mlx_vlm.models"
WINDOWS = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_theta": 1e4, "rope_type": "default", "type": "default", "partial_rotary_factor": 0.5}
ROPE["mrope_section"] = [4, 6, 6]  # of 16 pairs, half of a head

# What configurations ask for, by the names of their fields; each takes those that it has.
COMMON = {
    **sizes(
        layers=4, hidden=128, inner=64, heads=4, kv_heads=2, dims=64, latent_dims=32, rank=16, experts=4, active=2,
        expert_inner=32, single=1, positions=512, vocabulary=VOCABULARY,
    ),
    **PLAIN,
    **named(
        (128, "block_dim hidden_dim model_dim"),
        (64, "mlp_hidden_size shared_intermediate_size"),
        (VOCABULARY, "embedding_size"),
        (32, "dim_model_base block_multiple_of mamba_d_ssm"),
        (8, "mamba_d_head mamba_d_state"),
        (4, "num_query_heads num_transformer_layers linear_num_value_heads linear_conv_kernel_dim mamba_n_heads"),
        (4, "mamba_d_conv"),
        (3, "conv_L_cache"),
        (2, "top_k_experts mamba_expand sliding_window_pattern full_attention_interval attn_layer_period"),
        (2, "expert_layer_period"),
        (1, "num_shared_expert decoder_sparse_step num_kv_reuse_layers attn_layer_offset expert_layer_offset"),
        (512, "n_ctx"),
        (16, "sliding_window"),
        (False, "post_norm"),
        (True, "tie_word_embeddings use_conv_bias"),
    ),
    **{"attention_multiplier": 0.125, "layer_types": WINDOWS, "full_attn_idxs": [1, 3]},
    **{"mlp_only_layers": [], "rope_parameters": ROPE, "rope_scaling": None},
}  # fmt: skip
LONGROPE = {
    "type": "longrope",
    "factor": 1.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0] * 16,
}
NO_WINDOWS = {"layer_types": ["full_attention"] * 4, "sliding_window": None}
GEMMA4 = {
    "num_kv_shared_layers": 2,
    "global_head_dim": 128,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
}
MINISTRAL = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "type": "default",
        "rope_type": "default",
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 512,
    }
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
# Where a family needs other values than most.
EXTRA: dict[str, dict] = {
    "afm7": {"hidden_dim": 256, "num_layers": 3},
    "bitnet": NO_WINDOWS,
    "cohere2": {"head_dim": 32},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": None},
    "deepseek_v2": {"num_key_value_heads": 4, "rope_scaling": {"type": "default"}},
    "exaone4": {"rope_scaling": {"rope_type": "default"}, "sliding_window_pattern": "LG"},
    "minicpm3": {"num_key_value_heads": 4, "rope_scaling": LONGROPE},
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "llama"},
    "llmjpvl": {"model_type": "qwen3"},
    "multi_modality": {"model_type": "llama"},
    "openelm": {"ffn_dim_divisor": 16, "ffn_multipliers": [1.0] * 4, "num_query_heads": [4] * 4},
    "exaone_moe": {"is_moe_layer": [False, True] * 2},
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "gpt2": {"num_key_value_heads": 4},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_d_head": 64,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "position_embedding_type": "rope",
        "time_step_limit": [0.0, 100.0],
    },
    "hunyuan": {"num_experts": 4, "moe_topk": 2, "cla_share_factor": 1},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "mamba2": {
        "num_heads": 4,
        "head_dim": 64,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
    "ministral3": MINISTRAL,
    "mistral3": MINISTRAL | {"model_type": "ministral3"},
    "nemotron": {"hidden_act": "relu2"},
    "olmo": {"mlp_ratio": 2},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
    },
    "solar_open": {"rope_scaling": None},
    "qwen4_exp": {"layer_types": None},
    "step3p5": {"num_attention_groups": 2},
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
    values = {**COMMON, "model_type": name, **EXTRA.get(name, {})}
    if getattr(file, "ModelConfig", None) is None:
        raise ValueError("no configuration of a language model")
    mx.random.seed(0)
    text = (getattr(file, "TextConfig", None) or file.ModelConfig).from_dict(values)
    model = _language_model(file, text, file.ModelConfig, values)
    count = sum(x.size for _, x in tree_flatten(model.parameters()))
    if count > MOST:
        raise ValueError(f"{count / 1e6:,.0f} million numbers with these values")
    model.update(tree_map(_noise, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


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


HEAD = """# Families of mlx-vlm

Which families of mlx-vlm run on compressed caches.

The language model of every family in mlx-vlm that can be built small, with random weights in float32:
{prompt} tokens read and {new} written greedily, on mlx-vlm's own caches and on compressed ones. *Equal*: with pages
that lose nothing (sink, pages and windows as ever, numbers in place of codes) tokens are those of the plain model,
and logits within {near:g} of their norm. *int4*: the same text runs.

"""


def _written(model: nn.Module) -> tuple[list[int], np.ndarray]:
    """Greedy tokens behind the prompt, and their logits [NEW, V]."""
    attached = "make_cache" in vars(model)
    caches = model.make_cache() if attached else own_caches(model)
    step = mx.random.randint(0, VOCABULARY, (1, PROMPT), key=mx.random.key(1))
    tokens, rows = [], []
    for _ in range(NEW):
        out = model(step, cache=caches)
        rows.append(getattr(out, "logits", out)[:, -1].astype(mx.float32))
        tokens.append(mx.argmax(rows[-1]).item())
        step = mx.array([tokens[-1:]])
    return tokens, np.array(mx.concatenate(rows))


def family(name: str) -> Family:
    return examined(name, UNFIT, build, _written, attach, detach, INT4)


SURVEY = Survey(
    name="families.vlm",
    head=HEAD.format(prompt=PROMPT, new=NEW, near=NEAR),
    plain="run as they are, with a reason",
    skipped="were not compared.",
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family)


if __name__ == "__main__":
    console.run_tool(main)
