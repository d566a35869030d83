"""Try every model file of mlx-lm on compressed caches: `python -m experiments.families.mlx`.

Each is built small, with random weights: which layers are compressed, whether pages that lose nothing give the
plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from experiments.families.found import INT4, NEAR, NEW, PROMPT, Family, Survey, examined
from experiments.families.sizes import PLAIN as COMMON
from experiments.families.sizes import named, sizes
from mlxkv import console
from mlxkv.loading.attach import attach, detach

LAYERS, HEADS, KV_HEADS, DIMS, HIDDEN, VOCABULARY = 4, 4, 2, 32, 128, 128
WINDOW = 512  # tokens of sliding windows, more than any text here
KINDS = ["sliding_attention", "full_attention"] * 2

# Arguments of models -> small values. A value is used where an argument has no default, or a number.
SMALL = sizes(
    layers=LAYERS, hidden=HIDDEN, inner=96, heads=HEADS, kv_heads=KV_HEADS, dims=DIMS, latent_dims=DIMS, rank=32,
    experts=4, active=2, expert_inner=64, single=1, positions=1024, vocabulary=VOCABULARY,
) | named(
    (HIDDEN, "block_dim hidden_dim model_dim dim_model backbone_hidden_size embedding_size"),
    (96, "block_ffn_dim dense_intermediate_size ff_intermediate_size ffn_hidden_size mlp_hidden_size"),
    (64, "block_ff_dim moe_shared_expert_intermediate_size share_expert_dim intermediate_size_mlp"),
    (64, "expert_ffn_hidden_size shared_intermediate_size dim_model_base index_topk_blocks"),
    (HEADS, "num_transformer_layers swa_num_attention_heads mamba_num_heads"),
    (KV_HEADS, "n_kv_heads num_attention_groups swa_num_key_value_heads linear_num_value_heads index_n_heads"),
    (DIMS, "global_head_dim index_head_dim kv_channels swa_head_dim swa_v_head_dim hidden_size_per_head"),
    (DIMS, "query_pre_attn_scalar mamba_d_head o_lora_rank"),
    (16, "mamba_d_state mamba_head_dim state_size ssm_state_size mamba_chunk_size index_block_size"),
    (16, "block_multiple_of"),
    (8, "a_low_rank_dim decay_low_rank_dim gate_low_rank_dim v_low_rank_dim hidden_size_per_layer_input"),
    (8, "time_step_rank mamba_n_heads"),
    (4, "linear_conv_kernel_dim mamba_d_conv conv_kernel conv1d_width"),
    (3, "conv_L_cache"),
    (2, "num_experts_per_token moe_top_k top_k_experts o_groups mamba_expand conv_window cla_share_factor"),
    (2, "n_shared_head layer_group_size sliding_window_pattern full_attention_interval attn_layer_period"),
    (2, "expert_layer_period dense_attention_every_n_layers"),
    (1, "n_groups num_expert_group num_shared_expert moe_layer_freq zero_expert_num decoder_sparse_step"),
    (1, "group_norm_size attn_layer_offset expert_layer_offset num_kv_reuse_layers"),
    (0, "num_kv_shared_layers num_nextn_predict_layers"),
    (128, "mamba_d_ssm"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size loop_window_size"),
    (WINDOW, "attention_chunk_size"),
    (1024, "block_size n_ctx index_topk"),
    (VOCABULARY, "num_vocab vocab_size_per_layer_input"),
)  # fmt: skip
# Arguments without a default that are no sizes.
PLAIN = {
    **COMMON,
    **named(
        (1e-5, "layernorm_epsilon"),
        (False, "mamba_proj_bias tie_word_embeddings use_conv_bias add_swa_attention_sink_bias"),
        (False, "add_full_attention_sink_bias linear_allow_neg_eigval"),
        (True, "post_norm mla_scale_kv_lora mla_scale_q_lora"),
        (1e4, "swa_rope_theta"),
    ),
    **{"attention_multiplier": DIMS**-0.5, "gegelu_limit": 20.0, "logits_soft_cap": 30.0},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_method": "MLA"},
    **{"zero_expert_type": "identity", "time_step_limit": (0.0, 1e3)},
    **{"layer_types": KINDS, "rope_scaling": None, "mlp_only_layers": []},
    **{"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
}
LATENT = {"num_key_value_heads": HEADS}  # every head of MLA has keys of its own
MIXED = ["linear_attention", "full_attention"] * 2
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
_LLAMA_4 = {
    **_ROPE,
    **{"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 1024, "factor": 1.0},
}
_YARN = {
    **{"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 1024},
    **{"short_factor": [1.0] * (DIMS // 2), "long_factor": [1.0] * (DIMS // 2)},
}
# What some families need besides.
OWN: dict[str, dict] = {
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    **dict.fromkeys(("deepseek_v2", "minicpm3"), LATENT | {"rope_scaling": _YARN}),
    "hunyuan": {"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}},
    "kimi_k3": {
        "text": {
            **{"linear_attn_config": _KDA, "kv_lora_rank": 32, "q_lora_rank": 32},
            **{"qk_nope_head_dim": DIMS, "qk_rope_head_dim": DIMS, "v_head_dim": DIMS},
        }
    },
    "llama4": {"text": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1}},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    **dict.fromkeys(("mellum", "spark2_5"), {"rope_parameters": dict.fromkeys(KINDS, _ROPE)}),
    "ministral3": {"rope_parameters": _LLAMA_4},
    "mistral4": LATENT | {"rope_parameters": _LLAMA_4},
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
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True], "sliding_window_pattern": "LLLG"},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid": {
        **{"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16},
        **{"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_chunk_size": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
    },
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1]},
    "gear": {"layer_types": ["conv_mixer", "full_attention"] * 2, "attn_logit_softcapping": 5.0},
    "kimi_linear": {"linear_attn_config": _KDA},
    "lfm2": {"full_attn_idxs": [1, 3], "block_ff_dim": 96},
    "lfm2_moe": {"full_attn_idxs": [1, 3], "layer_types": None},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "*"]},
    "olmo_hybrid": {"layer_types": MIXED},
    "qwen3_next": {"mlp_only_layers": []},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), {"text": _LINEAR}),
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "gemma3n": {
        "text": {
            **{"layer_types": KINDS, "num_kv_shared_layers": 0, "sliding_window": WINDOW},
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
MOST = 30_000_000  # numbers of a small model: more of them is a mistake in this file


def module(family: str) -> ModuleType:
    return import_module(f"mlx_lm.models.{family}")


def families() -> list[str]:
    """Return the names of all files of mlx-lm's models that define one."""
    folder = Path(mlx_lm.models.__path__[0])
    files = sorted(folder.glob("*.py"))
    return [file.stem for file in files if "class Model(" in file.read_text("utf-8")]


def small(kind: type, own: dict, family: str) -> dict:
    """Return the arguments of a small model."""
    out = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        default = parameter.default
        number = isinstance(default, int) and not isinstance(default, bool) and default > 0
        if name == "model_type":
            out[name] = family
        elif default is inspect.Parameter.empty and name in SMALL | PLAIN:
            out[name] = (SMALL | PLAIN)[name]
        elif number and name in SMALL:
            out[name] = SMALL[name]
    return out | own


def build(family: str) -> nn.Module:
    """Return a small random model in float32. Matrices keep the variance of what they multiply."""
    file = module(family)
    mx.random.seed(7)
    own = dict(OWN.get(family, {}))
    text = own.pop("text", {})
    if family in TEXT:
        name, kind = TEXT[family]
        kind = getattr(module(name), kind)
        own["text_config"] = small(kind, text | OWN.get(name, {}), name)
    model = file.Model(file.ModelArgs.from_dict(small(file.ModelArgs, own, family)))
    if (size := sum(x.size for _, x in tree_flatten(model.parameters()))) > MOST:
        raise ValueError(f"{size} numbers, of a small model")
    if family == "phi3small":  # it writes to these places of the logits, of 100352 tokens
        model._dummy_tokenizer_ids = mx.array([VOCABULARY - 1])
    for _, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if type(layer) is nn.Linear:
            layer.weight = mx.random.normal(weight.shape) * weight.shape[1] ** -0.5
    model.update(tree_map(_filled, model.parameters()))
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
    """Greedy tokens and their logits [NEW, V], after a prompt in two chunks."""
    text = mx.random.randint(3, VOCABULARY - 20, (1, PROMPT), key=mx.random.key(5))
    caches, tokens, rows = make_prompt_cache(model), [], []
    for part in (text[:, :30], text[:, 30:]):
        out = model(part, cache=caches)
    for _ in range(NEW):
        rows.append(out[:, -1, : VOCABULARY - 1])
        tokens.append(mx.argmax(rows[-1]).item())
        out = model(mx.array([[tokens[-1]]]), cache=caches)
    return tokens, np.array(mx.concatenate(rows).astype(mx.float32))


HEAD = """# Families of mlx-lm

Which model files of mlx-lm run on compressed caches.

Every model file of mlx-lm, small, with random weights in float32, on compressed caches of mlxkv: {prompt} tokens
read in two chunks and {new} written greedily, on a CPU. *Equal*: with pages that lose nothing (sink, pages and
windows as ever, numbers in place of codes) tokens are those of the plain model, and logits within {near:g} of their
norm. *int4*: the same text runs. Layers with a sliding window stay exact.
"""


SURVEY = Survey(
    name="families.mlx",
    head=HEAD.format(prompt=PROMPT, new=NEW, near=NEAR),
    plain="with none and the reason",
    skipped="do not run here by themselves.",
    kind="file",
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family)


if __name__ == "__main__":
    console.run_tool(main)
