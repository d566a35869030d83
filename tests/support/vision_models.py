"""Small random vision models of mlx-vlm."""

import json
from importlib import import_module

import mlx.core as mx
from random_models import with_noise

TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 264,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    **TEXT,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "vision_start_token_id": 258,
    "vision_end_token_id": 259,
    "image_token_id": 260,
    "video_token_id": 261,
    "eos_token_id": 257,
    "vision_config": {
        "model_type": "qwen2_vl",
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": TEXT["hidden_size"],
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "mlp_ratio": 2,
    },
}
TOWER = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3 = {
    "model_type": "gemma3",
    "vocab_size": TEXT["vocab_size"],
    "hidden_size": TEXT["hidden_size"],
    "image_token_index": 260,
    "text_config": TEXT
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "mm_tokens_per_image": 4,
        "query_pre_attn_scalar": 64,
    },
    "vision_config": TOWER | {"model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4,
}
LLAVA = {
    "model_type": "llava",
    "image_token_index": 260,
    "vocab_size": TEXT["vocab_size"],
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": TOWER
    | {"model_type": "clip_vision_model", "projection_dim": 32, "vocab_size": 64},
}
CONFIGS = {one["model_type"]: one for one in (QWEN2_VL, GEMMA3, LLAVA)}


def vision_model(family: str, seed: int = 0):
    """A small vision model with random float32 weights."""
    file, config = (
        import_module(f"mlx_vlm.models.{family}"),
        json.loads(json.dumps(CONFIGS[family])),
    )
    whole = file.ModelConfig.from_dict(config)
    for part in ("text", "vision"):
        made = getattr(file, f"{part.title()}Config").from_dict(
            config.get(f"{part}_config", config)
        )
        setattr(whole, f"{part}_config", made)
    mx.random.seed(seed)
    return with_noise(file.Model(whole))


def prompt_with_image(family: str, length: int, seed: int = 1) -> tuple[mx.array, dict]:
    """Token ids [1, length] with four places for an image in front, and what the image's processor gives."""
    key = mx.random.key(seed)
    text = mx.random.randint(0, 256, (length - 6,), key=key).tolist()
    ids = mx.array([[258, *[260] * 4, 259, *text]])
    pixels = mx.random.normal((16, 3 * 2 * 14 * 14), key=key)
    if family == "qwen2_vl":
        return ids, {"pixel_values": pixels, "image_grid_thw": mx.array([[1, 4, 4]])}
    return ids, {"pixel_values": mx.random.normal((1, 3, 28, 28), key=key)}
