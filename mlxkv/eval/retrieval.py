"""Task `retrieval`: find codes anywhere in a long text, asked for at its end. Kinds as in RULER.

Every arm gets the same questions. Values are searched in the greedy answer; the likelihood is of the right
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache as once
from functools import partial
from math import isfinite
from os.path import commonprefix
from random import Random
from typing import cast

import mlx.core as mx

from mlxkv.errors import MachineError, UserError, brief
from mlxkv.eval.arms import Arms
from mlxkv.eval.engine import Part, TaskOptions
from mlxkv.eval.questions import KINDS, Document, Question, document
from mlxkv.generate import reading

SEED = "retrieval-1"  # count it up when texts or scores change
PER_TEXT = 16  # most questions of a kind about one text
MARGIN = 200  # tokens of a context reserved for question and answer
# Tokens of a greedy answer: a start, and a sentence per value.
START, PER_VALUE = 16, 32


def parts(arms: Arms, options: TaskOptions) -> list[Part]:
    """Return one part per context and document, which is read once for all kinds of questions; `pooled`
    joins their results."""
    document_of = texts(arms.loaded, options)
    asks = {"seed": SEED, "kinds": KINDS}
    return [
        Part(
            "retrieval",
            str(index + 1),
            context,
            partial(_run, document_of, context, index),
            count * len(KINDS),
            asks | {"context": context, "document": index, "questions": count},
        )
        for context in options.contexts
        for index, count in enumerate(asked_of(options))
    ]


def pooled(kind: str, context: int, documents: list[dict]) -> dict:
    """Return the results of one arm on several documents as one, of one kind of question; "documents": of each, which
    values were found."""
    of_kind = [document["kinds"][kind] for document in documents]
    right, likely = (
        [x for document in of_kind for x in document[key]] for key in ("right", "likely")
    )
    return {
        "kind": kind,
        "context": context,
        "tokens": documents[-1]["tokens"],
        "questions": len(right),
        "values": _mean([value for question in right for value in question]),
        "likelihood": _mean([x for question in likely for value in question for x in value]),
        "documents": [
            [value for question in document["right"] for value in question] for document in of_kind
        ],
        "kv_bytes": documents[-1]["kv_bytes"],
    }


def asked_of(options: TaskOptions) -> list[int]:
    """Return how many questions of each kind are asked about each document."""
    count = max(min(options.samples, options.questions), -(-options.questions // PER_TEXT))
    quotient, remainder = divmod(options.questions, count)
    return [quotient + (at < remainder) for at in range(count)]


def texts(loaded, options: TaskOptions) -> Callable[[int, int], Document]:
    """Return a function (context, index) -> document, which makes each document once."""

    def measure(text: str) -> int:
        return len(encode(loaded, text))

    @once
    def text(context: int, index: int) -> Document:
        rng = Random(f"{SEED}-plain-{context}-{index}")
        ask = asked_of(options)[index]
        return document(rng, context - MARGIN, ask, measure)

    return text


def _run(
    document_of, context: int, index: int, arms: Arms, names, progress
) -> Iterator[tuple[str, dict]]:
    for name in names:
        with arms.attached(name) as loaded:
            yield name, _measure(arms, loaded, name, document_of(context, index), progress)


def _measure(arms: Arms, loaded, name: str, document: Document, progress) -> dict:
    """Return, by kind, of each question which values were found, and how likely their tokens were."""
    begin = prefix(loaded, document.text)
    kinds = {kind: {"right": [], "likely": []} for kind in KINDS}
    head, cache = [], []
    for kind, rows in kinds.items():
        for question in document.of(kind):
            prompt = ask(loaded, document.text, question.question)
            start, question_tokens = split(prompt, begin)
            if start != head:  # the same for nearly all questions
                head, cache = start, reading.prefill(loaded, start)
            answer = question.answer if has_template(loaded) else f" {question.answer}"
            likely = score(loaded, deepcopy(cache), question_tokens, answer, question.values)
            rows["likely"].append(likely)
            rows["right"].append(_found(loaded, deepcopy(cache), question_tokens, question))
            progress(1)
    return {"tokens": len(head), "kv_bytes": arms.stored(name, cache), "kinds": kinds}


def _found(loaded, cache: list, prompt: list[int], question: Question) -> list[bool]:
    """Return which values a greedy answer names, in any order."""

    def named(text: str) -> list[bool]:
        text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
        return [bool(re.search(rf"(?<!\d){value}(?!\d)", text)) for value in question.values]

    def done(text: str) -> bool:  # a number at the end may go on
        return not text[-1:].isdigit() and all(named(text))

    limit = START + PER_VALUE * len(question.values)
    line = not has_template(loaded)
    return named(greedy(loaded, cache, prompt, limit, done, line))


def _mean(values: list) -> float:
    return sum(values) / len(values)


# -- answers: the likelihood of a given one, and the likeliest


def score(
    loaded, cache: list, prompt: Sequence[int], answer: str, values: Sequence[str]
) -> list[list[float]]:
    """Return the log probabilities of the tokens of each value of `answer`, after `prompt` and the tokens in the
    cache. The cache grows by prompt and answer.

    values: in their order in `answer`.
    """
    tokens = encode(loaded, answer)
    if reading.drops_tokens(cache):
        # The last tokens of a prompt choose, so read the question as a prompt.
        reading.extend(loaded, cache, prompt[:-1])
        prompt = prompt[-1:]
    _, nll = reading.likely(loaded, cache, [*prompt, *tokens])
    numbers = cast(list[float], (-nll[len(prompt) - 1 :]).tolist())
    return [[numbers[i] for i in span] for span in spans(loaded, tokens, values)]


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
    row = _last(loaded, cache, prompt)
    tokens, text = [], ""
    while True:
        if not isfinite(float(mx.logsumexp(row))):  # one NaN makes it NaN
            raise MachineError(f"[eval] NaN or infinity in the logits of {loaded.name}")
        tokens.append(int(mx.argmax(row)))
        if tokens[-1] in stop:
            break
        text = loaded.tokenizer.decode(tokens)
        over = line and "\n" in text.lstrip()
        if over or len(tokens) >= limit or (enough and enough(text)):
            break
        row = _last(loaded, cache, tokens[-1:])
    return text.lstrip().split("\n")[0] if line else text


def _last(loaded, cache: list, tokens: Sequence[int]) -> mx.array:
    """Return the logits after the last of `tokens`, [vocabulary]. The cache grows."""
    *_, logits = reading.follow(loaded, cache, tokens)
    return logits[-1]


# -- prompts: by the chat template, or as `Question: ... Answer:` without one

_STARTS = ("What", "0", '{"')


def has_template(loaded) -> bool:
    return bool(loaded.tokenizer.has_chat_template)


def encode(loaded, text: str) -> list[int]:
    """Encode without special tokens."""
    return list(loaded.tokenizer.encode(text, add_special_tokens=False))


def ask(loaded, text: str, question: str) -> list[int]:
    """Return a prompt, up to the start of the answer: the text and a question, in one turn of the user.

    Thinking is switched off. Raises UserError if the model's chat template refuses the turn.
    """
    if not has_template(loaded):
        return list(loaded.tokenizer.encode(f"{text}\n\nQuestion: {question}\nAnswer:"))
    try:
        return list(
            loaded.tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{text}\n\n{question}"}],
                add_generation_prompt=True,
                return_dict=False,
                enable_thinking=False,
            )
        )
    except Exception as error:  # jinja's errors and whatever a template raises itself
        raise UserError(
            f"[eval] the model's chat template refuses a question: {brief(error)}"
        ) from None


def prefix(loaded, text: str) -> list[int]:
    """Return the tokens with which every prompt about the text starts."""
    return list(commonprefix([ask(loaded, text, start) for start in _STARTS]))


def split(prompt: list[int], prefix: list[int]) -> tuple[list[int], list[int]]:
    """Split a prompt into (prefix, rest). The prefix is shorter than `prefix` if the tokenizer joins
    its end with the question."""
    shared = min(len(commonprefix([prompt, prefix])), len(prompt) - 1)
    return prompt[:shared], prompt[shared:]
