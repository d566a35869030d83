"""Task `retrieval`: find codes anywhere in a long text, asked for at its end. Kinds as in RULER.

Every arm gets the same questions. Values are searched in the greedy answer; the likelihood is of the right
answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache as once
from functools import partial
from random import Random

from mlxkv.eval import feed
from mlxkv.eval.arms import Arms
from mlxkv.eval.questions import plain, prompts
from mlxkv.eval.questions.plain import Document, Question
from mlxkv.eval.tasks import answers
from mlxkv.eval.tasks.part import Part, Results, TaskOptions, by_context

SEED = "retrieval-1"  # count it up when texts or scores change
PER_TEXT = 16  # most questions of a kind about one text
MARGIN = 200  # tokens of a context that question and answer may take
# Tokens of a greedy answer: a start, and a sentence per value.
START, PER_VALUE = 16, 32


def parts(arms: Arms, options: TaskOptions) -> list[Part]:
    """Return one part per context and document, which is read once for all kinds of questions; `pooled`
    joins their results."""
    document_of = texts(arms.loaded, options)
    return [
        Part(
            "retrieval",
            f"{context}-{index + 1}",
            partial(_run, document_of, context, index, options),
            count * len(options.kinds),
            {
                "seed": SEED,
                "kinds": options.kinds,
                "context": context,
                "document": index,
                "questions": count,
            },
        )
        for context in options.contexts
        for index, count in enumerate(asked_of(options))
    ]


def pooled(results: dict[str, Results]) -> dict[str, Results]:
    """Return results with one part per kind and context, "retrieval-single-2048", in place of one per
    document, "retrieval-2048-3"."""
    contexts, out = by_context(results, "retrieval")
    for context, documents in contexts.items():
        for kind in next(iter(documents[0].values()))["kinds"]:
            out[f"retrieval-{kind}-{context}"] = {
                name: _pooled(kind, int(context), [part[name] for part in documents])
                for name in documents[0]
            }
    return out


def _pooled(kind: str, context: int, documents: list[dict]) -> dict:
    """Join one arm's results; "documents": of each, which values were found."""
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
        return len(prompts.encode(loaded, text))

    @once
    def text(context: int, index: int) -> Document:
        rng = Random(f"{SEED}-plain-{context}-{index}")
        ask = asked_of(options)[index]
        return plain.document(rng, context - MARGIN, ask, measure)

    return text


def _run(
    document_of, context: int, index: int, options: TaskOptions, arms, names, progress
) -> Results:
    out = {}
    for name in names:
        with arms.attached(name) as loaded:
            document = document_of(context, index)
            out[name] = _measure(arms, loaded, name, document, options, progress)
    return out


def _measure(arms: Arms, loaded, name: str, document: Document, options, progress) -> dict:
    """Return, by kind, of each question which values were found, and how likely their tokens were."""
    begin = prompts.prefix(loaded, document.text)
    kinds = {kind: {"right": [], "likely": []} for kind in options.kinds}
    head, cache = [], []
    for kind, rows in kinds.items():
        for question in document.of(kind):
            prompt = prompts.ask(loaded, document.text, question.question)
            start, question_tokens = prompts.split(prompt, begin)
            if start != head:  # the same for nearly all questions
                head, cache = start, feed.prefill(loaded, start)
            answer, values = prompts.answer(loaded, question.answer), question.values
            likely = answers.score(loaded, deepcopy(cache), question_tokens, answer, values)
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
    line = not prompts.has_template(loaded)
    return named(answers.greedy(loaded, cache, prompt, limit, done, line))


def _mean(values: list) -> float:
    return sum(values) / len(values)
