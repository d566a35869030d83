"""Tiny models of many families with random float32 weights, for tests of the seam and of
loading."""

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes

VOCAB = 64
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
NARROW = {"hidden_size": 256, "intermediate_size": 64}  # families without head_dim: 256 / 4 = 64
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
LATENT_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_scaling": {
        "type": "longrope",
        "rope_type": "default",
        "factor": 1.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0] * 16,
    },
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA3N = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 16,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1e6,
    "final_logit_softcapping": 30.0,
    "layer_types": [*WINDOWS, "sliding_attention", "full_attention"],
    "activation_sparsity_pattern": [0.0] * 6,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "global_head_dim": 128,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 16,
    "layer_types": WINDOWS,
    "use_double_wide_mlp": False,
}
MAMBA = {
    "mamba_d_conv": 4,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
FALCON_H1 = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16}

# What each family adds to BASE. The ones below the line cannot be compressed, or only in part.
FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen2": NARROW,
    "qwen3": {"rope_theta": 1e4},
    "phi3": NARROW,
    "olmo2": {},
    "phi": NARROW | {"layer_norm_eps": 1e-5, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 2},
    "gemma3": {
        "text_config": {"sliding_window": 16, "sliding_window_pattern": 2, "num_hidden_layers": 4}
    },
    "gpt_oss": EXPERTS | {"num_hidden_layers": 4, "sliding_window": 16, "layer_types": WINDOWS},
    "gemma3n": {"text_config": GEMMA3N},
    "gemma4_text": GEMMA4,
    "qwen3_next": LINEAR_ATTENTION,
    "jamba": NARROW | MAMBA,
    "falcon_h1": FALCON_H1,
    "deepseek_v2": LATENT_ATTENTION | {"num_key_value_heads": 4},
    "minicpm3": NARROW
    | LATENT_ATTENTION
    | {"dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0},
    "afm7": {
        "hidden_dim": 256,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "iquestloopcoder": {"loop_window_size": 16},
    "plamo2": NARROW
    | {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 64,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
        "mamba_chunk_size": 16,
    },
    "gemma2": {"attn_logit_softcapping": 0.5},
    "gear": {
        "num_hidden_layers": 4,
        "attn_logit_softcapping": 0.5,
        "layer_types": ["conv_mixer", "full_attention", "sliding_attention", "full_attention"],
    },
    "stablelm": NARROW
    | {
        "layer_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "use_qkv_bias": False,
        "partial_rotary_factor": 0.5,
    },
    # ------------------------------------------------------------------------------------------
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 1e3),
        "time_step_rank": "auto",
    },
    "deepseek_v3": LATENT_ATTENTION
    | {"num_key_value_heads": 4, "n_routed_experts": None, "first_k_dense_replace": 2},
}


def config_of(family: str) -> dict:
    """A config.json for a tiny model of `family`."""
    extra = FAMILIES[family]
    if "text_config" in extra:
        return {
            "model_type": family,
            "vocab_size": VOCAB,
            "text_config": {**BASE, "model_type": family, **extra["text_config"]},
        }
    return {**BASE, "model_type": family, **extra}


def random_model(family: str, seed: int = 0, **changes):
    """A tiny model of `family` with random float32 weights; `changes` go into its config."""
    mx.random.seed(seed)
    config = {**config_of(family), **changes}
    model_class, args_class = _get_classes(config)
    return with_noise(model_class(args_class.from_dict(config)))


def with_noise(model):
    """Add noise to every parameter: biases and norms start as constants, random ones make every path matter."""
    model.update(tree_map(_noise, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _noise(x: mx.array) -> mx.array:
    if x.size == 0 or not mx.issubdtype(x.dtype, mx.floating):
        return x
    return x.astype(mx.float32) + 0.02 * mx.random.normal(x.shape)


def tokens(count: int, seed: int = 1) -> mx.array:
    """[count] random token ids."""
    return mx.random.randint(0, VOCAB, (count,), key=mx.random.key(seed))
