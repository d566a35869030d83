"""Score a given answer: whether each token of its values is the likeliest, and how likely it is."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

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
