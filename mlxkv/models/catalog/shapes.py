"""Shapes of the caches of a model, and facts of its config.json. No framework is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxkv.errors import UserError

# Values that transformers leaves out of config.json when they are the default.
_GEMMA3 = {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144}
DEFAULTS = {
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3 | {"num_attention_heads": 8, "num_key_value_heads": 4},
}
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
WIDTH = ("hidden_size", "n_embd", "d_model")
LIMITS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
    *("seq_length", "n_ctx"),
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class LayerShape:
    """One cache of a model: a layer may have several, or none.

    kind: "full" (grows with the context), "sliding" (at most `window` tokens), "chunked" (a chunk of `window` tokens),
    "latent" (MLA: a latent and a rotary key per token, in place of keys and values), "index" (keys of a sparse index),
    "own" (`key_dim` numbers per token in a class of the family's own) or "state" (fixed size).
    reason: why no preset compresses a layer that grows, or "". expanded: numbers that a prefill makes of a latent.
    tied: whether keys have to keep their mean, because of a sink logit beside the scores (gpt-oss) or a cap on them
    (Gemma 2). queries: heads that read it, where that is known. state: bytes of fixed size. index: of the layer.
    """

    kind: str
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    expanded: int = 0
    tied: bool = False
    reason: str = ""
    queries: int = 0
    state: int = 0
    index: int = field(default=0, compare=False)

    def values(self, tokens: int) -> int:
        """Numbers that a plain cache holds after `tokens` tokens, states aside."""
        count = min(tokens, self.window) if self.window else tokens
        return count * self.kv_heads * (self.key_dim + self.value_dim)


def text_config(config: dict) -> dict:
    """Return the language model's part of a config, defaults filled in."""
    inner = config.get("text_config")
    merged = config | inner if isinstance(inner, dict) else dict(config)
    # The outer type names the family when the inner one is missing.
    model_type = merged.get("model_type", "")
    return DEFAULTS.get(model_type, {}) | {k: v for k, v in merged.items() if v is not None}


def _number(config: dict, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), (int, float)):
            return int(config[name])
    raise UserError(f"[config.json] no {names[0]}; this is not the config of a language model")


def context_limit(config: dict) -> int | None:
    """Return the longest context, in tokens, that a config.json was made for; None if it does not say."""
    text = {**config, **(config.get("text_config") or {})}
    limit = next((int(text[name]) for name in LIMITS if isinstance(text.get(name), int)), None)
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


def estimated_layers(config: dict) -> list[LayerShape]:
    """Return the caches of a usual decoder of these sizes whose layers all grow: an upper bound. Raises UserError."""
    config = text_config(config)
    count, heads = _number(config, *DEPTH), _number(config, *HEADS)
    dim = int(config.get("head_dim") or _number(config, *WIDTH) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return [
        LayerShape("full", kv_heads, dim, dim, queries=heads, index=index) for index in range(count)
    ]


def estimated_sizes(config: dict) -> tuple[int, int]:
    """Weights of a usual decoder, dense or of experts, and bytes of working memory a token. Raises UserError."""
    config = text_config(config)
    width, count, heads = (_number(config, *names) for names in (WIDTH, DEPTH, HEADS))
    dim = int(config.get("head_dim") or width // heads)
    attention = dim * 2 * (heads + int(config.get("num_key_value_heads") or heads))
    inner = int(config.get("intermediate_size") or 4 * width)
    experts = int(next((config[name] for name in EXPERTS if config.get(name)), 0))
    if experts:
        inner = int(config.get("moe_intermediate_size") or inner)
    tables = 1 if config.get("tie_word_embeddings", True) else 2
    layer = width * (attention + 3 * inner * (experts or 1))
    active = inner * int(config.get("num_experts_per_tok") or 1)
    weights = count * layer + tables * int(config.get("vocab_size") or 0) * width
    return weights, working_bytes(width, attention, active)


def working_bytes(width: int, attention: int, inner: int) -> int:
    """Working memory of one layer for a token of a prefill, in 16 bits: an estimate.

    width: of the residual. attention: numbers of its queries, keys, values and output. inner: width of what
    the layer projects down.
    """
    return 2 * (4 * width + max(attention, 3 * inner))
