"""Refuse unsupported options of `load` and sampling, before a framework is imported or a file is read."""

from __future__ import annotations

import json

from mlxkv.console import parse_size, parse_tokens
from mlxkv.errors import UserError
from mlxkv.formats.names import bound_of

# MLX's names, and those of other tools.
DTYPES = ("float32", "float16", "bfloat16")
_DTYPE_NAMES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16"}
_DTYPE_NAMES |= {"fp16": "float16", "f16": "float16", "half": "float16"}

# Arguments of transformers' apply_chat_template that users may not set: some change its return type, and padding
# makes a prompt of any length before its tokens are counted.
RESERVED = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "self"),
)


def dtype_name(name: str | None) -> str | None:
    """Return one of DTYPES for a common name ("fp16"), or None for None. Raises UserError."""
    dtype = None if name is None else _DTYPE_NAMES.get(name.strip().lower(), name.strip().lower())
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"[load] unknown dtype; got {name!r}; choose from {', '.join(DTYPES)}")
    return dtype


def check_weights(bits: int | None) -> None:
    """Raise UserError for bits of weights other than 8."""
    if bits not in (None, 8):
        raise UserError(f"[--weights] must be 8, or left out for weights as stored; got {bits}")


def check_sampling(temp: float | None, top_p: float | None) -> None:
    """Raise UserError for settings out of range; None means the model's recommended value."""
    if temp is not None and not 0 <= temp < float("inf"):  # refuses NaN too
        raise UserError(f"[--temp] must be 0 or more, and finite; got {temp}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"[--top-p] must be above 0 and at most 1; got {top_p}")


def template_arguments(text: str | None, think: bool | None = None) -> dict:
    """Return the extra arguments of a chat template: those of a JSON object, and `enable_thinking` from `think`. Raises
    UserError."""
    try:
        arguments = json.loads(text) if text else {}
    except ValueError as error:
        arguments = error
    if not isinstance(arguments, dict):
        raise UserError(
            f"[--chat-template-args] must be a JSON object; got {(text or '')[:60]!r}; write it like "
            """'{"enable_thinking": false}'"""
        )
    if reserved := sorted(set(arguments) & set(RESERVED)):
        raise UserError(f"[--chat-template-args] may not set {reserved[0]!r}; leave it out")
    return arguments if think is None else arguments | {"enable_thinking": think}


def fitting_sizes(
    kv: object, memory: str | int | None, context: str | int | None
) -> tuple[int | None, int | None]:
    """Return bytes and tokens that a share is turned round with, None where none are given. kv: what is asked for.
    Raises UserError for what is no size, and for another preset than a share."""
    if (memory is not None or context is not None) and bound_of(kv) is None:
        option, given = ("--context", context) if memory is None else ("--memory", memory)
        raise UserError(
            f"[{option}] is for --kv auto, the most bits that fit; got {given} and --kv {kv}; add --kv auto, or leave "
            f"{option} out: a model's whole context is used"
        )
    size = parse_size(memory, "--memory", "g") if isinstance(memory, str) else memory
    tokens = parse_tokens(context, "--context") if isinstance(context, str) else context
    for option, x in (("--memory", size), ("--context", tokens)):
        if x is not None and x < 1:
            raise UserError(f"[{option}] must be at least 1; got {x}")
    return size, tokens
