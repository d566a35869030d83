"""Tiny models of the families with multi-head latent attention (MLA), with random float32 weights."""

import mlx.core as mx
from mlx_lm.utils import _get_classes
from random_models import VOCAB, with_noise

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "q_lora_rank": 24,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_shared_experts": 1,
    "layer_group_size": 2,
}
LINEAR = {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 3]}
LINEAR |= {"full_attn_layers": [2, 4], "gate_lower_bound": -5.0}
KIMI = HYBRID | {
    "linear_attn_config": LINEAR,
    "model_max_length": 4096,
    "num_experts_per_token": 2,
    "mla_use_nope": True,
}
INDEX = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 40}
LONGCAT = {
    "num_layers": 2,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 4,
    "zero_expert_num": 1,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 64,
}
LATENT_FAMILIES: dict[str, dict] = {
    "deepseek_v3": EXPERTS,
    "deepseek_v32": EXPERTS | INDEX,
    "glm4_moe_lite": EXPERTS,
    "kimi_k3": {"text_config": BASE | KIMI | {"hidden_act": "situ"}},
    "kimi_linear": KIMI,
    "longcat_flash": LONGCAT,
    "bailing_hybrid": HYBRID | {"group_norm_size": 1},
    "bailing_moe_v3": HYBRID | {"moe_shared_expert_intermediate_size": 16},
    "mistral4": EXPERTS | {"rope_parameters": ROPE},
}


def latent_model(family: str, seed: int = 0, **changes):
    """A tiny model of `family`; `changes` go into its config."""
    mx.random.seed(seed)
    config = BASE | LATENT_FAMILIES[family]
    if "text_config" in config:
        inner = config["text_config"] | changes
        config = {"text_config": inner | {"model_type": "kimi_linear"}}
        changes = {}
    config = config | {"model_type": family} | changes
    model_class, args_class = _get_classes(config)
    return with_noise(model_class(args_class.from_dict(config)))
