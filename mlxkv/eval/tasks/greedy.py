"""Decode greedily, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import mlx.core as mx

from mlxkv.errors import MachineError
from mlxkv.eval import feed


def reply(
    loaded,
    cache: list,
    prompt: Sequence[int],
    limit: int,
    enough: Callable[[str], bool] | None = None,
    line: bool = False,
) -> str:
    """Return the likeliest continuation, up to `limit` tokens or the end of turn. The cache grows.

    enough: given the text so far, returns True to stop. line: stop after the first line, for models
    without turns, which would ask themselves the next question.
    Raises MachineError if the logits hold NaN or infinity.
    """
    stop = set(loaded.tokenizer.eos_token_ids)
    row = feed.log_probabilities(loaded, cache, prompt)[-1]
    tokens, text = [], ""
    while True:
        if not isfinite(row.max().item()):  # one NaN makes all of a row NaN
            raise MachineError(f"[eval] NaN or infinity in the logits of {loaded.name}")
        tokens.append(int(mx.argmax(row).item()))
        if tokens[-1] in stop:
            break
        text = loaded.tokenizer.decode(tokens)
        over = line and "\n" in text.lstrip()
        if over or len(tokens) >= limit or (enough and enough(text)):
            break
        row = feed.log_probabilities(loaded, cache, tokens[-1:])[-1]
    return text.lstrip().split("\n")[0] if line else text
