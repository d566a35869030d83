"""Bounds for the numbers of a config.json, checked before anything is built or allocated from them."""

from __future__ import annotations

from math import isfinite
from typing import Any

from mlxkv.models.catalog.shapes import DEFAULTS, ROTATING, context_limit, text_config
from mlxkv.untrusted import Unsound, whole

# Each layer is objects of Python, whatever it weighs: more layers than these are believed only where
# there are as many tensors. The largest models have 126.
LAYERS = 256
WIDE = 8192  # tensors of a layer: 384 experts of 9 tensors are 3456
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
COUNTS = (
    *("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "num_kv_shared_layers"),
)
WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size"),
    *("kv_lora_rank", "q_lora_rank"),
)
BOUNDS = {
    **dict.fromkeys(DEPTH, (1, 1 << 16)),
    **dict.fromkeys(COUNTS, (0, 1 << 16)),
    **dict.fromkeys(WIDTHS, (0, 1 << 24)),
    "vocab_size": (1, (1 << 31) - 1),
    "sliding_window_pattern": (1, 1 << 16),
    "full_attention_interval": (1, 1 << 16),
}


def check(config: dict, tensors: int | None = None) -> None:
    """Raise Unsound for sizes that no model has. tensors: in the weight files, where that is known.

    Names that are absent or null are left to their defaults; some families have a list, one per layer.
    """
    try:
        text = text_config(config)
        context_limit(config)
    except (TypeError, ValueError, ArithmeticError):
        raise Unsound("has a context length, scaling or model_type of no sound type") from None
    _insist_on_finite(text)
    for name, (low, most) in BOUNDS.items():
        values = text.get(name)
        if isinstance(values, str) and name == "sliding_window_pattern":
            continue  # exaone4 spells it out
        for value in values if isinstance(values, list) else [values]:
            if value is not None:
                whole(_integer(value), name, low, most)
    deep = max((text[name] for name in DEPTH if isinstance(text.get(name), int)), default=0)
    if tensors is not None and (deep > max(LAYERS, tensors) or tensors > WIDE * (deep or LAYERS)):
        raise Unsound(f"names {deep} layers, but the weights have {tensors} tensors")
    # In families that slide; others carry the number along.
    types, kind = text.get("layer_types"), text.get("model_type")
    slides = any("sliding" in str(name) for name in types) if isinstance(types, list) else False
    slides = slides or bool(text.get("sliding_window_pattern"))
    if kind in ROTATING and (slides or kind in DEFAULTS) and text.get("sliding_window") is not None:
        whole(_integer(text["sliding_window"]), "sliding_window", 1)


def _insist_on_finite(values: dict) -> None:
    """Raise Unsound for infinity, except as a limit of time steps, where models mean it."""
    for name, value in values.items():
        if isinstance(value, dict):
            _insist_on_finite(value)
        if isinstance(value, float) and not isfinite(value) and "limit" not in name:
            raise Unsound("has Infinity for a number")


def _integer(value: Any) -> Any:
    """4.0 -> 4; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
