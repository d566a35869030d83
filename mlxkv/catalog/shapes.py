"""Shapes of the caches of a model, and facts of its config.json. No framework is imported here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from mlxkv.errors import UserError
from mlxkv.untrusted import Unsound, whole

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
    reason: why no preset compresses a growing layer, or "". expanded: numbers that a prefill expands from a latent.
    tied: whether keys must keep their mean, because of a sink logit (gpt-oss) or capped scores (Gemma 2). queries:
    query heads that read it, if known. state: bytes of fixed size. index: of the layer.
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
        """Return how many numbers a plain cache contains at `tokens` tokens, without states."""
        count = min(tokens, self.window) if self.window else tokens
        return count * self.kv_heads * (self.key_dim + self.value_dim)


def text_config(config: dict) -> dict:
    """Return the language model's part of a config, with defaults."""
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
    """Return the caches of a standard decoder of these sizes with full attention everywhere: an upper bound. Raises
    UserError."""
    config = text_config(config)
    count, heads = _number(config, *DEPTH), _number(config, *HEADS)
    dim = int(config.get("head_dim") or _number(config, *WIDTH) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return [
        LayerShape("full", kv_heads, dim, dim, queries=heads, index=index) for index in range(count)
    ]


def estimated_sizes(config: dict) -> tuple[int, int]:
    """Return the weight count of a standard decoder, dense or with experts, and working bytes per token. Raises
    UserError."""
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
    """Estimate the working memory of one layer per prefill token, in 16 bits.

    width: of the residual. attention: numbers in its queries, keys, values and output. inner: width of the input to the
    down projection.
    """
    return 2 * (4 * width + max(attention, 3 * inner))


# -- bounds for the numbers of a config.json, checked before anything is built or allocated from them


# Each layer is Python objects, whatever its weights: more layers than this are accepted only with as many tensors.
# The largest models have 126.
LAYERS = 256
WIDE = 8192  # tensors of a layer: 384 experts of 9 tensors are 3456
COUNTS = (
    *("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "num_kv_shared_layers"),
)
# Names of loop counts, of sizes, and of lists with an item per layer.
DEEP = re.compile(r"(^|_)(n|num)_(\w+_)?(layers?|blocks)$")
COUNTED = re.compile(
    r"(^|_)(n|num)_(?!param)|(size|dim|dims|heads|layers|experts|rank|width|kernel)$"
)
LISTED = re.compile("layer|block|pattern|idx")
WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size"),
    *("kv_lora_rank", "q_lora_rank"),
)
SLIDING = ("gemma3", "gemma3_text", "gemma4_text", "cohere2", "gpt_oss", "olmo3")  # by default
BOUNDS = {
    **dict.fromkeys(DEPTH, (1, 1 << 16)),
    **dict.fromkeys(COUNTS, (0, 1 << 16)),
    **dict.fromkeys(WIDTHS, (0, 1 << 24)),
    **dict.fromkeys(WIDTHS[:3], (1, 1 << 24)),
    "vocab_size": (1, (1 << 31) - 1),
    "sliding_window_pattern": (1, 1 << 16),
    "full_attention_interval": (1, 1 << 16),
}


def check_numbers(config: dict, tensors: int | None = None) -> None:
    """Raise Unsound for sizes that no model has. tensors: their number in the weight files, if known.

    Absent or null keys keep their defaults; some families have a list, one item per layer.
    """
    try:
        text = text_config(config)
        context_limit(config)
    except (TypeError, ValueError, ArithmeticError):
        raise Unsound("has a context length, scaling or model_type of no sound type") from None
    _insist_on_finite(text)
    for name, (low, high) in BOUNDS.items():
        values = text.get(name)
        if isinstance(values, str) and name == "sliding_window_pattern":
            continue  # exaone4 spells it out
        for value in values if isinstance(values, list) else [values]:
            if value is not None:
                whole(_integer(value), name, low, high)
    deep = max((text[name] for name in DEPTH if isinstance(text.get(name), int)), default=0)
    if tensors is not None and (deep > max(LAYERS, tensors) or tensors > WIDE * (deep or LAYERS)):
        raise Unsound(f"names {deep} layers, but the weights have {tensors} tensors")
    # In sliding-window layers; other families have an unused number.
    types = text.get("layer_types")
    slides = any("sliding" in str(name) for name in types) if isinstance(types, list) else False
    slides = slides or text.get("sliding_window_pattern") or text.get("model_type") in SLIDING
    if slides and text.get("sliding_window") is not None:
        whole(_integer(text["sliding_window"]), "sliding_window", 1)


def _insist_on_finite(values: dict) -> None:
    """Raise Unsound for infinity, except as a limit of time steps, where it is valid."""
    for name, value in values.items():
        if isinstance(value, dict):
            _insist_on_finite(value)
        if isinstance(value, float) and not isfinite(value) and "limit" not in name:
            raise Unsound("has Infinity for a number")


def _integer(value: Any) -> Any:
    """Convert 4.0 to 4; return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_names(text: dict) -> None:
    """Raise Unsound for absurd values of keys that look like sizes. text: from `text_config`."""
    for name, value in text.items():
        if isinstance(value, dict) and name != "quantization":
            check_names(value)
        if LISTED.search(name) and isinstance(value, list | str) and len(value) > 4 * LAYERS:
            raise Unsound(f"names {len(value)} {name}")
        if COUNTED.search(name) and isinstance(value, int) and not isinstance(value, bool):
            high = LAYERS if DEEP.search(name) else 1 << 24
            whole(value, name, 0, high)
