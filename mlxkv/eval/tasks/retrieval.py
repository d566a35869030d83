"""Task `retrieval`: find codes anywhere in a long text, asked for at its end. Kinds as in RULER.

Every arm gets the same questions. A model trained on `texts.worlds` is scored on the right answer:
a value is right if each of its tokens is the likeliest. For other models the values are searched in
the greedy answer. The likelihood is of the right answer in both cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache as once
from functools import partial
from random import Random

from mlxkv.errors import UserError
from mlxkv.eval import feed
from mlxkv.eval.arms import Arms
from mlxkv.eval.questions import plain, planted, prompts
from mlxkv.eval.questions.document import KINDS, Document, Question
from mlxkv.eval.tasks import answers, greedy
from mlxkv.eval.tasks.part import Part, Progress, Results, TaskOptions

NEEDLES: dict[str, Callable] = {"worlds": planted.document, "plain": plain.document}
SEED = "retrieval-1"  # count it up when texts or scores change
PER_TEXT = 16  # questions of a kind about one text
MARGIN = 200  # tokens of a context that question and answer may take
SHORTEST = 512  # tokens with room for all kinds of facts, a question and its answer
BINS = 5
# Tokens of a greedy answer: a start, and a sentence per value.
START, PER_VALUE = 16, 32


def parts(arms: Arms, options: TaskOptions) -> list[Part]:
    """Return one part per kind and context. Raises UserError for options that cannot be used."""
    check(options)
    made = texts(arms.loaded, options)
    return [
        Part(
            "retrieval",
            f"{kind}-{context}",
            partial(_run, made, kind, context, options),
            options.questions,
            {
                "seed": SEED,
                "kind": kind,
                "context": context,
                "questions": options.questions,
                "needles": options.needles,
            },
            str(context),
        )
        for context in options.contexts
        for kind in options.kinds
    ]


def check(options: TaskOptions) -> None:
    if options.needles not in NEEDLES:
        choices = ", ".join(NEEDLES)
        raise UserError(f"[needles] unknown; got {options.needles!r}; choose from {choices}")
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        choices = ", ".join(KINDS)
        raise UserError(f"[kinds] unknown; got {unknown[0]!r}; choose from {choices}")
    if options.questions < 1:
        raise UserError(f"[questions] must be at least 1; got {options.questions}")
    if short := [context for context in options.contexts if context < SHORTEST]:
        raise UserError(f"[context] must be at least {SHORTEST} tokens; got {short[0]}")


def texts(loaded, options: TaskOptions) -> Callable[[int, int], Document]:
    """Return a function (context, index) -> document, which makes each document once."""

    def measure(text: str) -> int:
        return len(prompts.encode(loaded, text))

    @once
    def text(context: int, index: int) -> Document:
        rng = Random(f"{SEED}-{options.needles}-{context}-{index}")
        ask = min(PER_TEXT, options.questions - index * PER_TEXT)
        return NEEDLES[options.needles](rng, context - MARGIN, ask, measure)

    return text


def _run(made, kind: str, context: int, options: TaskOptions, arms, names, progress) -> Results:
    out = {}
    for name in names:
        with arms.attached(name) as loaded:
            out[name] = _measure(arms, loaded, name, made, kind, context, options, progress)
    return out


def _measure(
    arms: Arms, loaded, name: str, made, kind: str, context: int, options, progress: Progress
) -> dict:
    right: list[list[bool]] = []
    likely: list[list[list[float]]] = []
    asked: list[Question] = []
    tokens = nbytes = 0
    for index in range(-(-options.questions // PER_TEXT)):
        document = made(context, index)
        begin = prompts.prefix(loaded, document.text)
        for question in document.of(kind):
            prompt = prompts.ask(loaded, document.text, question.question)
            head, rest = prompts.split(prompt, begin)
            cache = arms.prefixes.read(loaded, name, head)
            tokens, nbytes = len(head), arms.stored(name, cache)
            answer = prompts.answer(loaded, question.answer)
            found, log = answers.score(loaded, feed.branch(cache), rest, answer, question.values)
            if options.needles == "plain":
                found = _found(loaded, feed.branch(cache), rest, question)
            right.append(found)
            likely.append(log)
            asked.append(question)
            progress(1)
    values = [value for each in right for value in each]
    logs = [log for each in likely for value in each for log in value]
    return {
        "kind": kind,
        "context": context,
        "tokens": tokens,
        "questions": len(asked),
        "values": _mean(values),
        "every": _mean([all(each) for each in right]),
        "likelihood": _mean(logs),
        "depths": _bins(asked, right, likely),
        "kv_bytes": nbytes,
    }


def _found(loaded, cache: list, prompt: list[int], question: Question) -> list[bool]:
    """Return which values a greedy answer names, in any order."""

    def named(text: str) -> list[bool]:
        text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
        return [bool(re.search(rf"(?<!\d){value}(?!\d)", text)) for value in question.values]

    def done(text: str) -> bool:  # a number at the end may go on
        return not text[-1:].isdigit() and all(named(text))

    limit = START + PER_VALUE * len(question.values)
    line = not prompts.has_template(loaded)
    return named(greedy.reply(loaded, cache, prompt, limit, done, line).text)


def _bins(asked: list[Question], right: list, likely: list) -> list[dict]:
    """Count asked and right values by the depth of their facts."""
    out = []
    for at in range(BINS):
        hits, logs = [], []
        for question, found, log in zip(asked, right, likely, strict=True):
            for depth, hit, each in zip(question.depths, found, log, strict=True):
                if min(int(depth * BINS), BINS - 1) == at:
                    hits.append(hit)
                    logs += each
        out.append(
            {
                "depth": (at + 0.5) / BINS,
                "asked": len(hits),
                "right": sum(hits),
                "likelihood": _mean(logs) if logs else None,
            }
        )
    return out


def _mean(values: list) -> float:
    return sum(values) / len(values)
