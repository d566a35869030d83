"""Read the shapes of a model's caches and its size from config.json. No framework is imported here."""

from __future__ import annotations

from dataclasses import dataclass

from mlxkv.errors import UserError

# Model types whose sliding layers mlx-lm keeps in a rotating cache of the window's size. In the
# others it keeps the whole context, whatever config.json says about windows.
ROTATING = {
    *("gemma3_text", "gemma3", "gemma3n_text", "gemma3n", "gemma4_text", "gemma4", "gpt_oss"),
    *("cohere2", "llama", "ministral3", "mistral3", "olmo3", "exaone4", "exaone_moe", "mellum"),
    *("afmoe", "laguna", "iquestloopcoder", "mimo_v2_flash", "step3p5"),
}
# Values that transformers leaves out of config.json when they are the default.
DEFAULTS: dict[str, dict] = {
    "gemma3_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2},
    "olmo3": {"sliding_window_pattern": 4},
    "gemma4_text": {"sliding_window": 512, "sliding_window_pattern": 5},
}
DEFAULTS["gemma3"] = DEFAULTS["gemma3_text"] | {"num_attention_heads": 8, "num_key_value_heads": 4}
# Model types of which mlx-lm caches latents (MLA). Of others with a kv_lora_rank it caches keys and values.
LATENTS = {
    *(
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k25",
        "kimi_k3",
        "kimi_vl",
    ),
    *("kimi_linear", "longcat_flash", "longcat_flash_ngram", "bailing_hybrid", "bailing_moe_v3"),
    *("mistral4", "kimi_k2"),
}
STATES = ("linear_attention", "mamba", "conv", "recurrent", "ssm")


@dataclass(frozen=True)
class LayerShape:
    """The cache of one layer.

    kind: "full" (grows with the context), "sliding" (at most `window` tokens), "latent" (MLA: a latent and a
    rotary key per token, in place of keys and values), "index" (keys of a sparse index, not compressed) or
    "state" (fixed size, not counted). expanded: numbers that a prefill makes of a latent. tied: whether keys have to
    keep their mean, because of a sink logit beside the scores (gpt-oss) or a cap on them (Gemma 2).
    """

    kind: str
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    expanded: int = 0
    tied: bool = False

    def values(self, tokens: int) -> int:
        """Numbers that a plain cache holds after `tokens` tokens."""
        kept = min(tokens, self.window) if self.window else tokens
        return kept * self.kv_heads * (self.key_dim + self.value_dim)


def text_config(config: dict) -> dict:
    """The language model's part of a config, defaults filled in."""
    inner = config.get("text_config")
    merged = config | inner if isinstance(inner, dict) else dict(config)
    # The outer type names the family when the inner one is missing.
    model_type = merged.get("model_type", "")
    return DEFAULTS.get(model_type, {}) | {k: v for k, v in merged.items() if v is not None}


def caches_latents(config: dict) -> bool:
    """Whether mlx-lm caches latents of a model. config: of `text_config`."""
    return bool(config.get("kv_lora_rank")) and config.get("model_type") in LATENTS


def _latents(config: dict, count: int, heads: int) -> list[LayerShape]:
    """The caches of a model with MLA: mlx-lm's own names for which of its layers have a state instead."""
    rank, rotary, plain = (
        int(config.get(name) or 0)
        for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    )
    made = heads * (plain + int(config.get("v_head_dim") or 0))
    one, state = LayerShape("latent", 1, rank, rotary, expanded=made), LayerShape("state")
    if index := config.get("index_head_dim"):
        return [one, LayerShape("index", 1, int(index))] * count
    if str(config.get("model_type")).startswith("longcat"):
        return [one] * 2 * count
    linear = (config.get("linear_attn_config") or {}).get("kda_layers")
    if linear is not None:  # counted from 1
        return [state if i + 1 in linear else one for i in range(count)]
    if group := config.get("layer_group_size"):  # the last of each, and what is left over
        whole = count // int(group) * int(group)
        return [one if (i + 1) % int(group) == 0 or i >= whole else state for i in range(count)]
    return [one] * count


def _number(config: dict, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), (int, float)):
            return int(config[name])
    raise UserError(f"[config.json] no {names[0]}; this is not the config of a language model")


def _kinds(config: dict, layers: int) -> list[str]:
    """'full', 'sliding' or 'state' for each layer."""
    rotates = config.get("model_type") in ROTATING and config.get("sliding_window")
    pattern = config.get("sliding_window_pattern")
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(pattern, str):  # exaone4 spells it out: "LLLG"
        types = ["full" if pattern[i % len(pattern)] == "G" else "sliding" for i in range(layers)]
    elif types is None and rotates and pattern:
        types = ["sliding" if (i + 1) % pattern else "full" for i in range(layers)]
    elif types is None and (interval := config.get("full_attention_interval")):
        types = ["linear_attention" if (i + 1) % interval else "full" for i in range(layers)]
    if types is None:
        return ["full"] * layers
    if len(types) != layers:
        raise UserError(f"[config.json] {layers} layers, but layer_types names {len(types)}")

    def kind(name: str) -> str:
        if any(state in name for state in STATES):
            return "state"
        return "sliding" if "sliding" in name and rotates else "full"

    return [kind(name) for name in types]


def layers_of(config: dict) -> list[LayerShape]:
    """The cache of each layer, from config.json alone. Raises UserError when it cannot tell."""
    config = text_config(config)
    count = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    dim = int(
        config.get("head_dim") or _number(config, "hidden_size", "n_embd", "d_model") // heads
    )
    if caches_latents(config):
        return _latents(config, count, heads)
    if config.get("kv_lora_rank") and config.get(
        "qk_nope_head_dim"
    ):  # cached as keys and values of heads
        dims = (int(config.get(f"qk_{name}_head_dim") or 0) for name in ("nope", "rope"))
        return [LayerShape("full", heads, sum(dims), int(config.get("v_head_dim") or dim))] * count
    kinds = _kinds(config, count)
    # Gemma 3n and 4: the last layers read the cache of earlier ones.
    kinds = kinds[: count - int(config.get("num_kv_shared_layers") or 0)]
    full_dim = int(config.get("global_head_dim") or dim)
    full_heads = int(config.get("num_global_key_value_heads") or kv_heads)
    tied = config.get("model_type") == "gpt_oss" or bool(config.get("attn_logit_softcapping"))
    shapes = {
        "full": LayerShape("full", full_heads, full_dim, full_dim, tied=tied),
        "sliding": LayerShape(
            "sliding", kv_heads, dim, dim, int(config.get("sliding_window") or 0)
        ),
        "state": LayerShape("state"),
    }
    return [shapes[kind] for kind in kinds]


def context_limit(config: dict) -> int | None:
    """The longest context, in tokens, that a config.json was made for; None if it does not say."""
    text = {**config, **(config.get("text_config") or {})}
    names = (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "n_ctx",
    )
    limit = next((int(text[name]) for name in names if isinstance(text.get(name), int)), None)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if limit is None or not isinstance(scaling, dict):
        return limit
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)) or str(text.get("model_type", "")).startswith("gemma3"):
        return limit  # Gemma 3 names the extended length
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "yarn":  # the extended length may or may not be named already
        original = scaling.get("original_max_position_embeddings")
        return max(limit, int(original * factor)) if original else int(limit * factor)
    return int(limit * factor) if kind in ("linear", "dynamic", "ntk") else limit


def _latent_parameters(config: dict) -> int:
    """Weights of a decoder with MLA whose experts begin behind the first dense layers: an estimate."""
    names = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim")
    hidden, heads, rank, plain = (_number(config, name) for name in names)
    rotary, values, q_rank, shared, dense = (
        int(config.get(name) or 0)
        for name in (
            *("qk_rope_head_dim", "v_head_dim", "q_lora_rank", "n_shared_experts"),
            "first_k_dense_replace",
        )
    )
    layers, queries = _number(config, "num_hidden_layers", "num_layers"), heads * (plain + rotary)
    attention = (hidden + queries) * q_rank if q_rank else hidden * queries
    attention += hidden * (rank + rotary) + heads * (rank * (plain + values) + values * hidden)
    experts = int(config.get("n_routed_experts") or config.get("num_experts") or 0)
    inner = int(config.get("intermediate_size") or config.get("ffn_hidden_size") or 4 * hidden)
    expert = int(
        config.get("moe_intermediate_size") or config.get("expert_ffn_hidden_size") or inner
    )
    dense = min(dense, layers) if experts else layers
    mlp = 3 * hidden * (dense * inner + (layers - dense) * expert * (experts + shared))
    tables = 1 if config.get("tie_word_embeddings", False) else 2
    return layers * attention + mlp + tables * int(config.get("vocab_size") or 0) * hidden


def parameters(config: dict) -> int:
    """Weights of a usual decoder, dense or mixture of experts: an estimate."""
    config = text_config(config)
    if caches_latents(config) and config.get("qk_nope_head_dim"):
        return _latent_parameters(config)
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    layers = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads")
    dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = hidden * dim * 2 * (heads + kv_heads)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    expert_inner = int(config.get("moe_intermediate_size") or inner)
    mlp = 3 * hidden * (expert_inner * experts if experts else inner)
    tables = 1 if config.get("tie_word_embeddings", True) else 2
    return layers * (attention + mlp) + tables * int(config.get("vocab_size") or 0) * hidden


def weight_bytes(config: dict) -> int:
    """Bytes of the weights, estimated, with the quantisation that config.json names."""
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    bits = quantization.get("bits")
    per_weight = bits + 32 / (quantization.get("group_size") or 64) if bits else 16
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    if not bits and dtype == "float32":
        per_weight = 32
    return int(parameters(config) * per_weight / 8)


def activation_bytes(config: dict, tokens: int) -> int:
    """Working memory of one layer for a prefill chunk of `tokens`, in 16 bits: an estimate."""
    config = text_config(config)
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads")
    dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    active = int(config.get("num_experts_per_tok") or 0)
    if active:
        inner = active * int(config.get("moe_intermediate_size") or inner)
    attention = 2 * heads * dim + 2 * kv_heads * dim
    return 2 * tokens * (4 * hidden + max(attention, 3 * inner))
