"""Small random models of every causal language model of transformers, and what each does on compressed caches, for
`python -m experiments.families`."""

from __future__ import annotations

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cuda_track.models import attach_model
from experiments.families.found import EXACT, NEW, PROMPT, Family, examined
from experiments.families.sizes import named, sizes

WINDOW = 512  # tokens of sliding windows, more than any text here
LAYERS, HEADS, KV_HEADS, DIMS, HIDDEN = 4, 4, 2, 16, 64
VOCABULARY = 120

# Names of numbers in configurations -> small values.
SMALL = sizes(
    layers=LAYERS, hidden=HIDDEN, inner=96, heads=HEADS, kv_heads=KV_HEADS, dims=DIMS, latent_dims=DIMS, rank=32,
    experts=4, active=2, expert_inner=32, single=1, positions=1024, vocabulary=VOCABULARY,
) | named(
    (HIDDEN, "dim_model emb_dim embedding_size out_hidden_size backbone_hidden_size"),
    (64, "intermediate_size_mlp shared_experts_intermediate_size image_size num_position_embeddings"),
    (96, "d_ff d_inner decoder_ffn_dim dff dim_ff encoder_ffn_dim ffn_dim ffn_hidden_size"),
    (32, "expert_ffn_hidden_size shared_intermediate_size o_lora_rank qk_head_dim"),
    (2, "decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_blocks depth max_window_layers"),
    (HEADS, "attention_heads decoder_attention_heads encoder_attention_heads num_decoder_attention_heads"),
    (HEADS, "num_encoder_attention_heads swa_num_attention_heads"),
    (KV_HEADS, "kv_n_heads swa_num_key_value_heads num_global_key_value_heads index_n_heads n_mamba_heads"),
    (KV_HEADS, "linear_num_heads linear_num_value_heads o_groups"),
    (DIMS, "global_head_dim index_head_dim swa_head_dim kv_channels d_kv dim_head linear_head_dim"),
    (DIMS, "query_pre_attn_scalar mamba_d_head mamba_head_dim"),
    (16, "mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size block_size"),
    (4, "ffn_num_experts conv_kernel"),
    (2, "num_experts_per_token"),
    (1, "n_groups num_expert_group moe_num_shared_experts"),
    (0, "num_kv_shared_layers num_nextn_predict_layers"),
    (8, "laurel_rank mamba_dt_rank time_step_rank prompt_length hidden_size_per_layer_input mamba_n_heads"),
    (8, "mamba_num_heads"),
    (128, "mamba_d_ssm"),
    (WINDOW, "sliding_window sliding_window_size attention_chunk_size window_size keep_window_size local_attention"),
    (1024, "max_seq_len max_source_positions max_target_positions index_topk"),
    (VOCABULARY, "codebook_size unpadded_vocab_size vocab_size_per_layer_input"),
)  # fmt: skip
TOKENS_OF_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def _small(defaults: dict, own: dict) -> dict:
    """Return the options that make a configuration with these defaults small; own: of a family, by name."""
    out = {}
    for name, value in defaults.items():
        if isinstance(value, dict) and "model_type" in value:
            out[name] = _small(value, own.get(name, {}))
        elif name in SMALL and (
            isinstance(value, int) and not isinstance(value, bool) and value > 0
        ):
            out[name] = SMALL[name]
        elif name in TOKENS_OF_CONFIG and value is not None:
            out[name] = 1
    return out | {k: v for k, v in own.items() if not isinstance(v, dict) or k not in out}


_LATENT = {"num_key_value_heads": HEADS}  # every head of MLA has keys of its own
_MIXED = ["linear_attention", "full_attention"] * 2
_DIMS = {"head_dim": DIMS}
# What some families need besides.
OWN = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots3_note_text"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3"), _LATENT),
    **dict.fromkeys(("youtu", "sarvam_mla"), _LATENT),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _DIMS),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _LATENT | {"layer_types": _MIXED}),
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4}
            for name in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots1": _DIMS
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "moshi": {"codebook_size": 128, "audio_encoder_config": {"codebook_size": 128}},
    "nemotron": _DIMS | {"num_key_value_heads": KV_HEADS},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    **dict.fromkeys(
        ("qwen4_exp_text",),
        {"hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": DIMS}
        | {"indexer_budget": 1024, "indexer_compress_ratio": 4},
    ),
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def config_of(family: str):
    kind = CONFIG_MAPPING[family]
    return kind(**_small(kind().to_dict(), OWN.get(family, {})))


def families() -> list[str]:
    """Return the names of all causal language models in transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(family: str) -> PreTrainedModel:
    """Return a small random model. Matrices keep the variance of what they multiply: attention is not flat."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(family)).eval().float()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, module.weight.shape[1] ** -0.5)
    return model


# What cannot be built, or does not run by itself, and why.
NOT_BUILT = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "reads the cache of another model"
    ),
    **dict.fromkeys(
        ("musicgen", "musicgen_melody"), "a model of three parts; its auto class builds none"
    ),
    "gemma3n": "takes timm for its images; gemma3n_text is here",
    **dict.fromkeys(
        ("dots3_note", "qwen4_exp"),
        "settings by layer in a model of several parts; its text part is here",
    ),
}


def family(name: str) -> Family:
    torch.set_num_threads(1)
    return examined(
        name, NOT_BUILT, build, _written, attach_model.attach, attach_model.detach, EXACT
    )


def _written(model) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, the prompt's before them, and their logits [NEW, V]."""
    torch.manual_seed(5)
    ids = torch.randint(3, VOCABULARY - 20, (1, PROMPT))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0].tolist(), torch.cat(out.logits).float().numpy()
