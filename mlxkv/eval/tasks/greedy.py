"""Decode greedily, one token at a time, and keep the margins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import mlx.core as mx

from mlxkv.errors import MachineError
from mlxkv.eval import feed


@dataclass(frozen=True)
class Reply:
    """tokens: all that were chosen, with the end of turn. margins: of each token, its log
    probability minus that of the second best. text: without the end of turn."""

    tokens: list[int]
    margins: list[float]
    text: str


def reply(
    loaded,
    cache: list,
    prompt: Sequence[int],
    limit: int,
    enough: Callable[[str], bool] | None = None,
    line: bool = False,
) -> Reply:
    """Return the likeliest continuation, up to `limit` tokens or the end of turn. The cache grows.

    enough: given the text so far, returns True to stop. line: stop after the first line, for models
    without turns, which would ask themselves the next question.
    Raises MachineError if the logits hold NaN or infinity.
    """
    stop = set(loaded.tokenizer.eos_token_ids)
    row = feed.log_probabilities(loaded, cache, prompt)[-1]
    tokens, margins, text = [], [], ""
    while True:
        token, margin = _best(row)
        if not isfinite(margin):
            raise MachineError(f"[eval] NaN or infinity in the logits of {loaded.name}")
        tokens.append(token)
        margins.append(margin)
        if token in stop:
            break
        text = loaded.tokenizer.decode(tokens)
        over = line and "\n" in text.lstrip()
        if over or len(tokens) >= limit or (enough and enough(text)):
            break
        row = feed.log_probabilities(loaded, cache, [token])[-1]
    return Reply(tokens, margins, text.lstrip().split("\n")[0] if line else text)


def _best(row: mx.array) -> tuple[int, float]:
    """Return the likeliest token of log probabilities [vocabulary], and its lead over the second."""
    token = mx.argmax(row)
    rest = mx.where(mx.arange(row.shape[0]) == token, -mx.inf, row)
    margin = row[token] - rest.max()
    return int(token.item()), margin.item()
