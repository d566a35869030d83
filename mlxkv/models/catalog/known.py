"""The keys of config.json that decide shapes and sizes, for the aliases of the hub: `fit` and `bench` need no
network. No framework is imported here.
"""

from __future__ import annotations

# As the conversions that the aliases name are quantised.
QUANTIZATION = {"bits": 4, "group_size": 64}
_QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_QWEN3 = _QWEN | {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}
_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, **more) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        **more,
    }


CONFIGS: dict[str, dict] = {
    "gemma-3-1b": _GEMMA3
    | _sizes(26, 1152, 4, 1, 6912, sliding_window=512, max_position_embeddings=32768),
    "gemma-3-4b": _GEMMA3
    | _sizes(34, 2560, 8, 4, 10240, sliding_window=1024, max_position_embeddings=131072),
    "gemma-3n-e2b": {"model_type": "gemma3n_text", "head_dim": 256, "vocab_size": 262400}
    | _sizes(30, 2048, 8, 2, 8192, sliding_window=512, max_position_embeddings=32768)
    | {
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
        "num_kv_shared_layers": 10,
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {"model_type": "gpt_oss", "head_dim": 64, "vocab_size": 201088}
    | _sizes(24, 2880, 64, 8, 2880, sliding_window=128, max_position_embeddings=131072)
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": _LLAMA | _sizes(32, 4096, 32, 8, 14336, tie_word_embeddings=False),
    "llama-3.2-1b": _LLAMA | _sizes(16, 2048, 32, 8, 8192, head_dim=64),
    "llama-3.2-3b": _LLAMA | _sizes(28, 3072, 24, 8, 8192, head_dim=128),
    "mistral-7b": {"model_type": "mistral", "vocab_size": 32768, "tie_word_embeddings": False}
    | _sizes(32, 4096, 32, 8, 14336, max_position_embeddings=32768),
    "phi-4-mini": {"model_type": "phi3", "vocab_size": 200064, "tie_word_embeddings": True}
    | _sizes(32, 3072, 24, 8, 8192, max_position_embeddings=131072),
    "qwen2.5-1.5b": _QWEN
    | _sizes(28, 1536, 12, 2, 8960, model_type="qwen2", max_position_embeddings=32768),
    "qwen2.5-7b": _QWEN
    | _sizes(28, 3584, 28, 4, 18944, model_type="qwen2", max_position_embeddings=32768)
    | {"vocab_size": 152064, "tie_word_embeddings": False},
    "qwen3-0.6b": _QWEN3 | _sizes(28, 1024, 16, 8, 3072),
    "qwen3-4b": _QWEN3 | _sizes(36, 2560, 32, 8, 9728),
    "qwen3-8b": _QWEN3 | _sizes(36, 4096, 32, 8, 12288, tie_word_embeddings=False),
    "smollm2": {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
    | _sizes(30, 576, 9, 3, 1536, max_position_embeddings=8192),
    "smollm2-1.7b": {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
    | _sizes(24, 2048, 32, 32, 8192, max_position_embeddings=8192),
    "smollm3-3b": {"model_type": "smollm3", "vocab_size": 128256, "tie_word_embeddings": True}
    | _sizes(36, 2048, 16, 4, 11008, max_position_embeddings=65536),
}

# Weights that a usual decoder does not have: an embedding of every layer, of 256 dims each.
MORE_PARAMETERS = {"gemma-3n-e2b": 262144 * 30 * 256}
