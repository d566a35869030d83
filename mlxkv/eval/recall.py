"""Retrieval: facts anywhere in a long text, asked for at its end (texts: `mlxkv.eval.worlds`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os.path import commonprefix
from random import Random

from mlxkv.eval import feed
from mlxkv.eval.answers import score
from mlxkv.eval.worlds import Needle, haystack

PER_TEXT = 16  # questions about one text
FEWEST = 8  # facts in a text: an answer may need four of them
MARGIN = 200  # tokens of a context left for question and answer


@dataclass(frozen=True)
class Recall:
    """values: share of right values (every token of one the likeliest). every: share of questions
    with all values right. likelihood: mean log probability of a value's token. nbytes: of the cache
    after the last text, in `tokens` tokens."""

    kind: str
    questions: int
    values: float
    every: float
    likelihood: float
    tokens: int
    nbytes: int


def recall(
    loaded,
    kind: str,
    context: int,
    questions: int,
    seed: str = "recall",
    progress: Callable[[int], None] | None = None,
) -> Recall:
    """Ask `questions` of a kind (`worlds.KINDS`) in contexts of `context` tokens.

    The same seed asks the same questions of every preset. Seeds that begin with "train" are the
    training's own.
    """
    values, every, likelihoods, tokens, nbytes = [], [], [], 0, 0
    for index in range(-(-questions // PER_TEXT)):
        rng = Random(f"{seed}-{kind}-{context}-{index}")
        ask = min(PER_TEXT, questions - index * PER_TEXT)
        length = context - MARGIN
        facts = max(FEWEST, ask * (3 if kind == "values" else 1), length // 100)
        stack = haystack(kind, rng, length, ask, facts, measure=_measure(loaded))
        prompts = [_prompt(loaded, stack.text, needle) for needle in stack.needles]
        shared = len(commonprefix(prompts))
        cache = feed.prefill(loaded, prompts[0][:shared])
        tokens, nbytes = shared, feed.stored(loaded, cache)
        for prompt, needle in zip(prompts, stack.needles, strict=True):
            right, likely = score(
                loaded, feed.branch(cache), prompt[shared:], needle.answer, needle.values
            )
            values += right
            every.append(all(right))
            likelihoods += [each for value in likely for each in value]
            if progress:
                progress(1)
    return Recall(kind, len(every), _mean(values), _mean(every), _mean(likelihoods), tokens, nbytes)


def _mean(values: list) -> float:
    return sum(values) / len(values)


def _encode(loaded, text: str) -> list[int]:
    return loaded.tokenizer.encode(text, add_special_tokens=False)


def _measure(loaded) -> Callable[[str], int]:
    return lambda text: len(_encode(loaded, text))


def _prompt(loaded, text: str, needle: Needle) -> list[int]:
    content = f"{text}\n\n{needle.question}"
    return loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
