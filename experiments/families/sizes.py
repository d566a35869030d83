"""Names of sizes in configurations, by what they are. transformers, mlx-lm and mlx-vlm agree on most."""

from __future__ import annotations

NAMES = {
    "layers": "num_hidden_layers n_layer n_layers num_layers",
    "hidden": "hidden_size n_embd d_model",
    "inner": "intermediate_size n_inner",
    "heads": "num_attention_heads n_head n_heads num_heads",
    "kv_heads": "num_key_value_heads num_kv_heads linear_num_key_heads",
    "dims": "head_dim",
    "latent_dims": "qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim linear_key_head_dim linear_value_head_dim",
    "rank": "kv_lora_rank q_lora_rank",
    "experts": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "active": "num_experts_per_tok moe_topk moe_k",
    "expert_inner": "moe_intermediate_size shared_expert_intermediate_size",
    "single": "n_group topk_group num_shared_experts n_shared_experts first_k_dense_replace num_dense_layers",
    "positions": "max_position_embeddings n_positions model_max_length",
    "vocabulary": "vocab_size",
}


def named(*pairs: tuple[object, str]) -> dict[str, object]:
    """(value, "names") -> {name: value}"""
    return {name: value for value, names in pairs for name in names.split()}


def sizes(**roles: int) -> dict[str, int]:
    """Return the value of each name. roles: of NAMES."""
    return named(*((value, NAMES[role]) for role, value in roles.items()))


# Arguments without a default in mlx-lm and mlx-vlm that are no sizes.
PLAIN = named(
    (1e-5, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps"),
    (False, "attention_bias mlp_bias use_bias use_qkv_bias conv_bias use_cla use_mixed_mlp_moe"),
    (False, "use_expert_bias block_auto_adjust_ff_dim"),
    (True, "norm_topk_prob qk_norm use_qk_norm"),
    (1.0, "routed_scaling_factor logits_scaling embedding_multiplier residual_multiplier"),
    (1.0, "scale_depth scale_emb block_ffn_dim_multiplier"),
    (0.5, "partial_rotary_factor rotary_pct"),
    (1e4, "rope_theta rotary_emb_base"),
    ("silu", "hidden_act"),
)
