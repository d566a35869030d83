"""Requests with images in the engine: mlx-lm serves each of them alone, here with caches of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm import server

from mlxkv.errors import UserError
from mlxkv.models.loader import Loaded
from mlxkv.models.turns import Turns
from mlxkv.serve.job import Arguments
from mlxkv.serve.refusals import Refused


@dataclass
class Pictures:
    """What mlx-lm's `_serve_single` reads of the images of a prompt, with its names. cache_key: its tokens.
    starts: of images; pixel_values: what `VisionModel.embed_inputs` is given, all of it for the first one."""

    cache_key: list[int]
    starts: list[int]
    pixel_values: list[dict[str, Any]]


class NoSessions:
    """Stands where the engine has its kept caches: tokens in place of an image do not say which one it was."""

    nbytes = 0

    def __len__(self) -> int:
        return 0

    def stats_by_type(self) -> dict:
        return {}

    def fetch_nearest_cache(self, model, tokens: list[int]) -> tuple[None, list[int]]:
        return None, tokens

    def insert_cache(self, *args, **kwargs) -> None: ...


def read(loaded: Loaded, turns: Turns, request, args: Arguments, template: dict) -> tuple:
    """What mlx-lm's `_tokenize` returns, of a request with images. template: arguments of the chat template.
    Raises Refused, UserError, and what the template raises."""
    if loaded.vision is None:
        raise Refused(400, "[messages] this model takes no images; got one", "invalid_value")
    if args.continues:
        raise Refused(400, "[continue_final_message] goes with no images; got one", "invalid_value")
    server.process_message_content(request.messages)  # arguments of tool calls become values
    mark, (chat, tools) = turns.broken(request.messages, request.tools)
    if mark is not None:
        raise Refused(
            400,
            "[messages] words that are special tokens of the model cannot stand beside an image; leave them out",
            "invalid_value",
        )
    shaped = [_shaped(loaded, message) for message in chat]
    tokenizer = loaded.tokenizer
    text = tokenizer.apply_chat_template(
        shaped, tools=tools, tokenize=False, add_generation_prompt=True, **template
    )
    try:
        tokens, inputs = loaded.vision.tokens(text, args.job.images)
    except UserError as error:
        raise Refused(400, str(error), "invalid_value") from None
    state = "normal"
    if tokenizer.has_thinking:
        begun = tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
        state = "reasoning" if begun else state
    state = getattr(tokenizer, "response_initial_state", None) or state
    return tokens, [tokens], ["assistant"], state, Pictures(list(tokens), [0], [inputs])


def _shaped(loaded: Loaded, message: dict) -> dict:
    count = message.get("images", 0)
    if not count:
        return message
    return loaded.vision.message(message["role"], message["content"], count)
