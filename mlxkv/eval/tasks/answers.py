"""Score a given answer by the likelihood of its values, or decode one greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import mlx.core as mx

from mlxkv.errors import MachineError
from mlxkv.eval import feed


def score(
    loaded, cache: list, prompt: Sequence[int], answer: str, values: Sequence[str]
) -> list[list[float]]:
    """Return the log probabilities of the tokens of each value of `answer`, after `prompt` and the tokens in the
    cache. The cache grows by prompt and answer.

    values: in the order in which they stand in `answer`.
    """
    tokens = loaded.tokenizer.encode(answer, add_special_tokens=False)
    if feed.selects(cache):  # the last tokens of a prompt choose, so read the question as a prompt
        feed.extend(loaded, cache, prompt[:-1])
        prompt = prompt[-1:]
    logs = feed.log_probabilities(loaded, cache, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    scores = mx.take_along_axis(logs, mx.array(tokens)[:, None], axis=-1)[:, 0].tolist()
    return [[scores[i] for i in span] for span in spans(loaded, tokens, values)]


def spans(loaded, tokens: list[int], values: Sequence[str]) -> list[list[int]]:
    """Return the indices of the tokens that spell each value."""
    ends = [len(loaded.tokenizer.decode(tokens[: i + 1])) for i in range(len(tokens))]
    text, starts = loaded.tokenizer.decode(tokens), [0, *ends[:-1]]
    out, cursor = [], 0
    for value in values:
        begin = text.index(value, cursor)
        cursor = begin + len(value)
        places = enumerate(zip(starts, ends, strict=True))
        out.append([i for i, (start, end) in places if end > begin and start < cursor])
    return out


def greedy(
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
