"""Small random models of every causal language model of transformers, and what each does on compressed caches, for
`python -m experiments.families`."""

from __future__ import annotations

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cuda_track.models import attach_model
from experiments.families.found import EXACT, NEW, PROMPT, Family, examined
from experiments.families.sizes import DBRX, DIMS, KV_HEADS, LATENT, STATES, VOCABULARY, small

_DIMS = {"head_dim": DIMS}
# What some families need besides.
OWN = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots3_note_text"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3"), LATENT),
    **dict.fromkeys(("youtu", "sarvam_mla"), LATENT),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _DIMS),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), LATENT | {"layer_types": STATES}),
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4}
            for name in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": DBRX["attn_config"]},
    "dots1": _DIMS
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": STATES},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "moshi": {"codebook_size": 128, "audio_encoder_config": {"codebook_size": 128}},
    "nemotron": _DIMS | {"num_key_value_heads": KV_HEADS},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "qwen4_exp_text": {
        **{"hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": DIMS},
        **{"indexer_budget": 1024, "indexer_compress_ratio": 4},
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def config_of(family: str):
    kind = CONFIG_MAPPING[family]
    return kind(**small(kind().to_dict(), OWN.get(family, {})))


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
