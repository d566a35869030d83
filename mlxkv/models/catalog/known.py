"""The keys of config.json that decide shapes and sizes, for the aliases of the hub: `fit` and `bench` need no
network. Where transformers' own defaults are a published model's, these are the values. No framework is imported here.
"""

from __future__ import annotations

# As the conversions that the aliases name are quantised.
QUANTIZATION = {"bits": 4, "group_size": 64}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "tie_word_embeddings": True}
_QWEN3 = _QWEN | {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}
_LLAMA = {
    **{"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "vocab_size": 128256},
    **{"tie_word_embeddings": True, "max_position_embeddings": 131072},
}
_GEMMA3 = {
    **{"model_type": "gemma3_text", "tie_word_embeddings": True, "head_dim": 256},
    **{"vocab_size": 262144, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
}


def _sizes(layers: int, width: int, heads: int, kv_heads: int, inner: int, **keys) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        **keys,
    }


# Keys that mlx-lm's code asks for; no size depends on their values.
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
_ROPE |= {"original_max_position_embeddings": 8192}
_GEMMA3N = {
    **{"model_type": "gemma3n_text", "head_dim": 256, "vocab_size": 262400, "rms_norm_eps": 1e-6},
    **_sizes(30, 2048, 8, 2, 8192, sliding_window=512, max_position_embeddings=32768),
    **{"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6, "laurel_rank": 64},
    **{"num_kv_shared_layers": 10, "vocab_size_per_layer_input": 262144, "rope_theta": 1e6},
    **{"hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "altup_coef_clip": 120.0},
    **{"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_correct_scale": True},
    **{"altup_active_idx": 0, "final_logit_softcapping": 30.0, "rope_local_base_freq": 1e4},
}


def _gemma4(*sizes: int, **keys) -> dict:
    """Five layers of six slide; layers that see all have heads twice as wide, whose values are their keys."""
    text = {
        **{"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512},
        **{"vocab_size": 262144, "sliding_window": 1024, "rms_norm_eps": 1e-6},
        **{"max_position_embeddings": 262144, "attention_k_eq_v": True, "num_kv_shared_layers": 0},
        **{"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False},
        **{"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * (sizes[0] // 6)},
    }
    return {"model_type": "gemma4", "text_config": text | _sizes(*sizes) | keys}


def _gpt_oss(layers: int, experts: int) -> dict:
    """Experts in MXFP4 as published, the rest in 8 bits."""
    maps = [f"{name}_proj" for name in ("gate", "up", "down")]
    paths = [f"model.layers.{i}.mlp.experts.{name}" for i in range(layers) for name in maps]
    mxfp4 = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    return {
        **{"model_type": "gpt_oss", "head_dim": 64, "vocab_size": 201088},
        **_sizes(layers, 2880, 64, 8, 2880, sliding_window=128, max_position_embeddings=131072),
        **{"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)},
        **{"num_local_experts": experts, "num_experts_per_tok": 4, "tie_word_embeddings": False},
        **{"quantization": {"bits": 8, "group_size": 64} | dict.fromkeys(paths, mxfp4)},
    }


def _qwen3_5(*sizes: int, **keys) -> dict:
    """Three layers of four have a state, of linear attention."""
    text = {
        **{"model_type": "qwen3_5_text", "head_dim": 256, "vocab_size": 248320},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "full_attention_interval": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
        **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False},
    }
    kind = "qwen3_5_moe" if "num_experts" in keys else "qwen3_5"
    return {"model_type": kind, "text_config": text | _sizes(*sizes) | keys}


_QWEN3_5_27B = _qwen3_5(64, 5120, 24, 4, 17408, linear_num_value_heads=48)
_QWEN3_5_MOE = _qwen3_5(
    *(40, 2048, 16, 2, 512),
    **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    **{"shared_expert_intermediate_size": 512},
)


CONFIGS: dict[str, dict] = {
    "devstral-small-2": {
        "model_type": "mistral3",
        "text_config": {
            **{"model_type": "ministral3", "head_dim": 128, "vocab_size": 131072},
            **_sizes(40, 5120, 32, 8, 32768, max_position_embeddings=393216, rms_norm_eps=1e-5),
            **{"tie_word_embeddings": False, "rope_parameters": _ROPE},
        },
    },
    "gemma-3-1b": _GEMMA3
    | _sizes(26, 1152, 4, 1, 6912, sliding_window=512, max_position_embeddings=32768),
    "gemma-3-4b": _GEMMA3
    | _sizes(34, 2560, 8, 4, 10240, sliding_window=1024, max_position_embeddings=131072),
    "gemma-3n-e2b": {"model_type": "gemma3n", "text_config": _GEMMA3N},
    "gemma-4-26b": _gemma4(
        *(30, 2816, 16, 8, 2112),
        **{"num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128},
        **{"top_k_experts": 8, "moe_intermediate_size": 704},
    ),
    "gemma-4-31b": _gemma4(60, 5376, 32, 16, 21504, num_global_key_value_heads=4),
    "gemma-4-e4b": _gemma4(
        *(42, 2560, 8, 2, 10240),
        **{"attention_k_eq_v": False, "num_kv_shared_layers": 18, "sliding_window": 512},
        **{"hidden_size_per_layer_input": 256, "max_position_embeddings": 131072},
    ),
    "glm-4.7-flash": {"model_type": "glm4_moe_lite", "vocab_size": 154880, "rope_theta": 1e6}
    | _sizes(47, 2048, 20, 20, 10240, max_position_embeddings=202752, rms_norm_eps=1e-5)
    | {
        **{"kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64},
        **{"qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1},
        **{"routed_scaling_factor": 1.8, "norm_topk_prob": True, "tie_word_embeddings": False},
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "llama-3.1-8b": _LLAMA | _sizes(32, 4096, 32, 8, 14336, tie_word_embeddings=False),
    "llama-3.2-1b": _LLAMA | _sizes(16, 2048, 32, 8, 8192, head_dim=64),
    "llama-3.2-3b": _LLAMA | _sizes(28, 3072, 24, 8, 8192, head_dim=128),
    "minimax-m2.5": {"model_type": "minimax_m2", "vocab_size": 200064, "head_dim": 128}
    | _sizes(62, 3072, 48, 8, 1536, max_position_embeddings=196608, rms_norm_eps=1e-6)
    | {
        **{"num_local_experts": 256, "num_experts_per_tok": 8, "shared_intermediate_size": 0},
        **{"rotary_dim": 64, "rope_theta": 5e6, "tie_word_embeddings": False, "use_qk_norm": True},
    },
    "mistral-7b": {"model_type": "mistral", "vocab_size": 32768, "tie_word_embeddings": False}
    | _sizes(32, 4096, 32, 8, 14336, max_position_embeddings=32768, rms_norm_eps=1e-5),
    "phi-4-mini": {"model_type": "phi3", "vocab_size": 200064, "tie_word_embeddings": True}
    | _sizes(32, 3072, 24, 8, 8192, max_position_embeddings=131072, rms_norm_eps=1e-5),
    "qwen2.5-1.5b": _QWEN
    | _sizes(28, 1536, 12, 2, 8960, model_type="qwen2", max_position_embeddings=32768),
    "qwen2.5-7b": _QWEN
    | _sizes(28, 3584, 28, 4, 18944, model_type="qwen2", max_position_embeddings=32768)
    | {"vocab_size": 152064, "tie_word_embeddings": False},
    "qwen3-0.6b": _QWEN3 | _sizes(28, 1024, 16, 8, 3072),
    "qwen3-4b": _QWEN3 | _sizes(36, 2560, 32, 8, 9728),
    "qwen3-8b": _QWEN3 | _sizes(36, 4096, 32, 8, 12288, tie_word_embeddings=False),
    "qwen3-coder-30b": _QWEN3
    | _sizes(48, 2048, 32, 4, 6144, model_type="qwen3_moe", max_position_embeddings=262144)
    | {
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        **{"rope_theta": 1e7, "tie_word_embeddings": False},
    },
    "qwen3.5-4b": _qwen3_5(32, 2560, 16, 4, 9216, tie_word_embeddings=True),
    "qwen3.5-9b": _qwen3_5(32, 4096, 16, 4, 12288),
    "qwen3.5-35b": _QWEN3_5_MOE,
    "qwen3.6-27b": _QWEN3_5_27B,
    "qwen3.6-35b": _QWEN3_5_MOE,
    "qwen3.8-27b": _QWEN3_5_27B,
    "smollm2": {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
    | _sizes(30, 576, 9, 3, 1536, max_position_embeddings=8192, rms_norm_eps=1e-5),
    "smollm2-1.7b": {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
    | _sizes(24, 2048, 32, 32, 8192, max_position_embeddings=8192, rms_norm_eps=1e-5),
    "smollm3-3b": {"model_type": "smollm3", "vocab_size": 128256, "tie_word_embeddings": True}
    | _sizes(36, 2048, 16, 4, 11008, max_position_embeddings=65536, rms_norm_eps=1e-6),
}
