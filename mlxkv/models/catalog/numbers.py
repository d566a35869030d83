"""Bounds for the numbers of a config.json, checked before anything is built or allocated from them."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from mlxkv.models.catalog.shapes import DEPTH, context_limit, text_config
from mlxkv.untrusted import Unsound, whole

# Each layer is objects of Python, whatever it weighs: more layers than these are believed only where
# there are as many tensors. The largest models have 126.
LAYERS = 256
WIDE = 8192  # tensors of a layer: 384 experts of 9 tensors are 3456
COUNTS = (
    *("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "num_kv_shared_layers"),
)
# Names of numbers that loops run over, of sizes, and of lists with an item a layer.
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
    """Raise Unsound for sizes that no model has. tensors: in the weight files, where that is known.

    Names that are absent or null are left to their defaults; some families have a list, one per layer.
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
    # In layers that slide; other families carry the number along.
    types = text.get("layer_types")
    slides = any("sliding" in str(name) for name in types) if isinstance(types, list) else False
    slides = slides or text.get("sliding_window_pattern") or text.get("model_type") in SLIDING
    if slides and text.get("sliding_window") is not None:
        whole(_integer(text["sliding_window"]), "sliding_window", 1)


def _insist_on_finite(values: dict) -> None:
    """Raise Unsound for infinity, except as a limit of time steps, where models mean it."""
    for name, value in values.items():
        if isinstance(value, dict):
            _insist_on_finite(value)
        if isinstance(value, float) and not isfinite(value) and "limit" not in name:
            raise Unsound("has Infinity for a number")


def _integer(value: Any) -> Any:
    """4.0 -> 4; anything else is returned."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_names(text: dict) -> None:
    """Raise Unsound for sizes, by the looks of their names, that nothing should be built of. text: of `text_config`."""
    for name, value in text.items():
        if isinstance(value, dict) and name != "quantization":
            check_names(value)
        if LISTED.search(name) and isinstance(value, list | str) and len(value) > 4 * LAYERS:
            raise Unsound(f"names {len(value)} {name}")
        if COUNTED.search(name) and isinstance(value, int) and not isinstance(value, bool):
            high = LAYERS if DEEP.search(name) else 1 << 24
            whole(value, name, 0, high)
