"""Try every model file of mlx-lm on compressed caches: `python -m experiments.families.mlx`.

Each is built small, with random weights: which layers are compressed, whether pages that lose nothing give the
plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from experiments.families.found import INT4, NEW, PROMPT, Family, Survey, examined
from experiments.families.sizes import (
    DBRX,
    DIMS,
    HEADS,
    KV_HEADS,
    LATENT,
    LAYERS,
    STATES,
    VOCABULARY,
    WINDOW,
    WINDOWS,
    small,
)
from mlxkv import console
from mlxkv.loading.attach import attach, detach

# The arguments of the text model inside of a model of several parts: (file, class).
TEXT = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("kimi_k25", "TextConfig"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("llama", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}
_LINEAR = {
    **{"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": DIMS},
    **{"linear_value_head_dim": DIMS, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5},
    **{"head_dim": DIMS, "full_attention_interval": 2, "rope_parameters": None},
}
_KDA = {
    **{"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 2},
    **{"head_dim": DIMS, "short_conv_kernel_size": 4},
}
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}
LLAMA_4 = {
    **_ROPE,
    **{"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 1024, "factor": 1.0},
}
YARN = {
    **{"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 1024},
    **{"short_factor": [1.0] * (DIMS // 2), "long_factor": [1.0] * (DIMS // 2)},
}
# What some families need besides.
OWN: dict[str, dict] = {
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    **dict.fromkeys(("deepseek_v2", "minicpm3"), LATENT | {"rope_scaling": YARN}),
    "hunyuan": {"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}},
    "kimi_k3": {
        "text": {
            **{"linear_attn_config": _KDA, "kv_lora_rank": 32, "q_lora_rank": 32},
            **{"qk_nope_head_dim": DIMS, "qk_rope_head_dim": DIMS, "v_head_dim": DIMS},
        }
    },
    "llama4": {"text": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1}},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    **dict.fromkeys(("mellum", "spark2_5"), {"rope_parameters": dict.fromkeys(WINDOWS, _ROPE)}),
    "ministral3": {"rope_parameters": LLAMA_4},
    "mistral4": LATENT | {"rope_parameters": LLAMA_4},
    "muse_spark": {
        "text": {
            **{"post_norm_eps": 1e-5, "layer_rope_theta": [1e4, 0, 1e4, 0]},
            **{"final_logit_softcapping": 30.0, "output_multiplier": 1.0, "moe_hidden_size": 64},
            "moe_intermediate_size": 64,
        }
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}} for _ in range(LAYERS)
        ]
    },
    "openelm": {
        **{"num_query_heads": [HEADS] * LAYERS, "num_kv_heads": [KV_HEADS] * LAYERS},
        **{"ffn_dim_divisor": 16, "ffn_multipliers": [1.0] * LAYERS},
    },
    "qwen3": {"rope_theta": 1e4},
    "dbrx": DBRX,
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True], "sliding_window_pattern": "LLLG"},
    "granitemoehybrid": {
        **{"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": DIMS},
        **{"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_chunk_size": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
    },
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1]},
    "gear": {"layer_types": ["conv_mixer", "full_attention"] * 2, "attn_logit_softcapping": 5.0},
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2": {"full_attn_idxs": [1, 3], "block_ff_dim": 96},
    "lfm2_moe": {"full_attn_idxs": [1, 3], "layer_types": None},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "*"]},
    "olmo_hybrid": {"layer_types": STATES},
    "qwen3_next": {"mlp_only_layers": []},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), {"text": _LINEAR}),
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "gemma3n": {
        "text": {
            **{"layer_types": WINDOWS, "num_kv_shared_layers": 0, "sliding_window": WINDOW},
            **{"activation_sparsity_pattern": [0.0] * LAYERS, "altup_num_inputs": 2},
            **{"altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0},
            **{"laurel_rank": 8, "final_logit_softcapping": 30.0, "rope_local_base_freq": 1e4},
            **{"hidden_size_per_layer_input": 8, "intermediate_size": 96},
        }
    },
}
# What is no model, or does not run by itself in mlx-lm, and why.
NOT_BUILT: dict[str, str] = {
    "olmo": "asks for a package (hf_olmo), and reads no prompt: adds the word causal to scores",
    "prism_hadamard_qwen35": "wants weights packed by its own tool; its text model is qwen3_5",
    "muse_spark": "its norms are a Metal kernel: no CPU",
    "bitnet": "its weights are read by a Metal kernel: no CPU",
}
MODELS = "mlx_lm.models"
MOST = 40_000_000  # numbers of a small model: more of them is a mistake in this file


def families() -> list[str]:
    """Return the names of all files of mlx-lm's models that define one."""
    folder = Path(mlx_lm.models.__path__[0])
    files = sorted(folder.glob("*.py"))
    return [file.stem for file in files if "class Model(" in file.read_text("utf-8")]


def arguments(kind: type, own: dict, family: str) -> dict:
    """Return the arguments of a small model."""
    defaults = {name: x.default for name, x in inspect.signature(kind).parameters.items()}
    return small(defaults, {"model_type": family} | own)


def build(family: str) -> nn.Module:
    """Return a small random model in float32. Matrices keep the variance of what they multiply."""
    file = import_module(f"{MODELS}.{family}")
    mx.random.seed(7)
    own = dict(OWN.get(family, {}))
    text = own.pop("text", {})
    if family in TEXT:
        name, kind = TEXT[family]
        kind = getattr(import_module(f"{MODELS}.{name}"), kind)
        own["text_config"] = arguments(kind, text | OWN.get(name, {}), name)
    model = file.Model(file.ModelArgs.from_dict(arguments(file.ModelArgs, own, family)))
    if family == "phi3small":  # it writes to these places of the logits, of 100352 tokens
        model._dummy_tokenizer_ids = mx.array([VOCABULARY - 1])
    for _, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if type(layer) is nn.Linear:
            layer.weight = mx.random.normal(weight.shape) * weight.shape[1] ** -0.5
    return finished(model, _filled)


def finished(model: nn.Module, fill: Callable[[mx.array], mx.array]) -> nn.Module:
    """Return a model whose weights went through `fill`, in float32. Raises ValueError if it is not small."""
    if (size := sum(x.size for _, x in tree_flatten(model.parameters()))) > MOST:
        raise ValueError(f"{size / 1e6:,.0f} million numbers with these values")
    model.update(tree_map(fill, model.parameters()))
    model.set_dtype(mx.float32)
    model.eval()
    mx.eval(model.parameters())
    return model


def _filled(x: mx.array) -> mx.array:
    """Random numbers in place of a matrix that starts as zeros, by which all logits would be zero."""
    if x.ndim == 2 and mx.issubdtype(x.dtype, mx.floating) and not mx.any(x).item():
        return mx.random.normal(x.shape) * x.shape[1] ** -0.5
    return x


def family(name: str) -> Family:
    return examined(name, NOT_BUILT, build, _written, attach, detach, INT4)


def _written(model: nn.Module) -> tuple[list[int], np.ndarray]:
    return greedy(model, make_prompt_cache(model), 30)


def greedy(model: nn.Module, caches: list, first: int = PROMPT) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and their logits [NEW, V], after a prompt whose `first` tokens are a chunk of their own."""
    text = mx.random.randint(3, VOCABULARY - 20, (1, PROMPT), key=mx.random.key(5))
    for part in filter(lambda part: part.size, (text[:, :first], text[:, first:])):
        out = model(part, cache=caches)
    tokens, rows = [], []
    for _ in range(NEW):
        rows.append(getattr(out, "logits", out)[:, -1, : VOCABULARY - 1].astype(mx.float32))
        tokens.append(mx.argmax(rows[-1]).item())
        out = model(mx.array([[tokens[-1]]]), cache=caches)
    return tokens, np.array(mx.concatenate(rows))


SURVEY = Survey(
    name="families.mlx",
    library="mlx-lm",
    what="Every model file that can be built",
    plain="with none and the reason",
    skipped="do not run here by themselves.",
    kind="file",
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family)


if __name__ == "__main__":
    console.run_tool(main)
