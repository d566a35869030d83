"""Small values for the configurations of models, by the names of their settings. transformers, mlx-lm and mlx-vlm agree
on most; what one family needs besides stands where it is built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

LAYERS, HEADS, KV_HEADS, DIMS, HIDDEN, VOCABULARY = 4, 4, 2, 32, 128, 128
WINDOW = 512  # tokens of sliding windows, more than any text here
WINDOWS = ["sliding_attention", "full_attention"] * 2
STATES = ["linear_attention", "full_attention"] * 2


def named(*pairs: tuple[object, str]) -> dict[str, object]:
    """(value, "names") -> {name: value}"""
    return {name: value for value, names in pairs for name in names.split()}


SMALL = named(
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_transformer_layers"),
    (HIDDEN, "hidden_size n_embd d_model dim_model emb_dim embedding_size out_hidden_size backbone_hidden_size"),
    (HIDDEN, "block_dim hidden_dim model_dim"),
    (2 * HIDDEN, "mamba_d_ssm"),
    (96, "intermediate_size n_inner d_ff d_inner decoder_ffn_dim dff dim_ff encoder_ffn_dim ffn_dim ffn_hidden_size"),
    (96, "block_ffn_dim dense_intermediate_size ff_intermediate_size mlp_hidden_size"),
    (64, "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp"),
    (64, "shared_experts_intermediate_size image_size num_position_embeddings block_ff_dim share_expert_dim"),
    (64, "moe_shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
    (64, "dim_model_base index_topk_blocks"),
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads num_query_heads"),
    (HEADS, "decoder_attention_heads encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads kv_n_heads n_kv_heads swa_num_key_value_heads linear_num_key_heads"),
    (KV_HEADS, "num_global_key_value_heads linear_num_heads linear_num_value_heads num_attention_groups"),
    (KV_HEADS, "index_n_heads n_mamba_heads o_groups"),
    (DIMS, "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim linear_key_head_dim"),
    (DIMS, "global_head_dim index_head_dim kv_channels swa_head_dim swa_v_head_dim hidden_size_per_head d_kv dim_head"),
    (DIMS, "linear_value_head_dim linear_head_dim query_pre_attn_scalar mamba_d_head kv_lora_rank"),
    (DIMS, "q_lora_rank o_lora_rank"),
    (2 * DIMS, "qk_head_dim"),
    (16, "mamba_d_state mamba_head_dim state_size ssm_state_size mamba_chunk_size chunk_size index_block_size"),
    (16, "block_multiple_of block_size"),
    (8, "a_low_rank_dim decay_low_rank_dim gate_low_rank_dim v_low_rank_dim hidden_size_per_layer_input"),
    (8, "laurel_rank mamba_dt_rank time_step_rank prompt_length mamba_n_heads mamba_num_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts ffn_num_experts linear_conv_kernel_dim"),
    (4, "mamba_d_conv conv_kernel conv1d_width"),
    (3, "conv_L_cache"),
    (2, "num_experts_per_tok moe_topk moe_k num_experts_per_token moe_top_k top_k_experts mamba_expand conv_window"),
    (2, "cla_share_factor n_shared_head layer_group_size sliding_window_pattern full_attention_interval"),
    (2, "attn_layer_period expert_layer_period dense_attention_every_n_layers depth max_window_layers num_blocks"),
    (2, "decoder_layers encoder_layers num_decoder_layers num_encoder_layers"),
    (1, "n_group topk_group n_groups num_expert_group num_shared_experts n_shared_experts num_shared_expert"),
    (1, "moe_num_shared_experts first_k_dense_replace num_dense_layers moe_layer_freq zero_expert_num group_norm_size"),
    (1, "decoder_sparse_step attn_layer_offset expert_layer_offset num_kv_reuse_layers"),
    (0, "num_kv_shared_layers num_nextn_predict_layers"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size loop_window_size"),
    (WINDOW, "attention_chunk_size keep_window_size local_attention"),
    (1024, "max_position_embeddings n_positions model_max_length max_seq_len max_source_positions"),
    (1024, "max_target_positions n_ctx index_topk"),
    (VOCABULARY, "vocab_size num_vocab codebook_size unpadded_vocab_size vocab_size_per_layer_input"),
)  # fmt: skip
# Settings of mlx-lm and mlx-vlm that have no default and are no sizes.
PLAIN = {
    **named(
        (1e-5, "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps"),
        (False, "attention_bias mlp_bias use_bias use_qkv_bias conv_bias use_cla use_mixed_mlp_moe use_expert_bias"),
        (False, "block_auto_adjust_ff_dim mamba_proj_bias tie_word_embeddings use_conv_bias post_norm"),
        (False, "add_swa_attention_sink_bias add_full_attention_sink_bias linear_allow_neg_eigval"),
        (True, "norm_topk_prob qk_norm use_qk_norm mla_scale_kv_lora mla_scale_q_lora"),
        (1.0, "routed_scaling_factor logits_scaling embedding_multiplier residual_multiplier scale_depth scale_emb"),
        (1.0, "block_ffn_dim_multiplier"),
        (0.5, "partial_rotary_factor rotary_pct"),
        (1e4, "rope_theta rotary_emb_base swa_rope_theta"),
    ),
    **{"attention_multiplier": DIMS**-0.5, "gegelu_limit": 20.0, "logits_soft_cap": 30.0},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_method": "MLA"},
    **{"zero_expert_type": "identity", "time_step_limit": (0.0, 1e3), "hidden_act": "silu"},
    **{"layer_types": WINDOWS, "rope_scaling": None, "mlp_only_layers": []},
    **{"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
}  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
LATENT = {"num_key_value_heads": HEADS}  # every head of MLA has keys of its own
DBRX = {
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
}


def small(defaults: Mapping[str, object], own: Mapping) -> dict:
    """Return the settings that make a configuration small: numbers in place of those of SMALL, and values where
    there is no default (`inspect.Parameter.empty`). own: of the family."""
    out, own = {}, dict(own)
    for name, value in defaults.items():
        if value is inspect.Parameter.empty and name in SMALL | PLAIN:
            out[name] = (SMALL | PLAIN)[name]
        elif type(value) is int and value > 0 and name in SMALL:
            out[name] = SMALL[name]
        elif name in TOKENS and value is not None:
            out[name] = 1
        elif isinstance(value, dict) and "model_type" in value:  # a part of a model
            out[name] = small(value, own.pop(name, {}))
    return out | own
