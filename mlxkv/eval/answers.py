"""Scoring an answer that is given: is every token of its values the likeliest, and how likely."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxkv.eval import feed


def score(
    loaded, cache: list, prompt: Sequence[int], answer: str, values: Sequence[str]
) -> tuple[list[bool], list[list[float]]]:
    """Of each value of `answer`, behind `prompt` and what the cache holds (it grows by both):
    whether each of its tokens is the likeliest, and their log probabilities.

    values: they stand in `answer` in this order.
    """
    tokens = loaded.tokenizer.encode(answer, add_special_tokens=False)
    if feed.selects(cache):  # its last tokens choose: a question is read as a prompt is
        feed.extend(loaded, cache, prompt[:-1])
        prompt = prompt[-1:]
    logs = feed.log_probabilities(loaded, cache, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    chosen = mx.take_along_axis(logs, mx.array(tokens)[:, None], axis=-1)[:, 0].tolist()
    right = (mx.argmax(logs, axis=-1) == mx.array(tokens)).tolist()
    places = spans(loaded, tokens, values)
    return (
        [all(right[i] for i in span) for span in places],
        [[chosen[i] for i in span] for span in places],
    )


def spans(loaded, tokens: list[int], values: Sequence[str]) -> list[list[int]]:
    """The tokens that write each value."""
    ends = [len(loaded.tokenizer.decode(tokens[: i + 1])) for i in range(len(tokens))]
    text, starts = loaded.tokenizer.decode(tokens), [0, *ends[:-1]]
    out, cursor = [], 0
    for value in values:
        begin = text.index(value, cursor)
        cursor = begin + len(value)
        whole = enumerate(zip(starts, ends, strict=True))
        out.append([i for i, (start, end) in whole if end > begin and start < cursor])
    return out
