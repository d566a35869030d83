"""Task `generation`: greedy replies after a long text, from each arm's cache.

Parts: "agreement" with the baseline token by token; "answers" to questions with one right answer;
"structured" output, a tool call as JSON after some examples. All start with the text that retrieval
reads first, so that the cache is compressed when they write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from os.path import commonprefix
from random import Random
from statistics import mean, median

from mlxkv.eval import feed
from mlxkv.eval.arms import BASELINE, Arms
from mlxkv.eval.questions import passages, plain, prompts, tools
from mlxkv.eval.tasks import answers, retrieval
from mlxkv.eval.tasks.greedy import Reply, reply
from mlxkv.eval.tasks.part import Part, Progress, Results, TaskOptions

SEED = "generation-1"  # count it up when prompts or scores change
CONTINUED = 4  # texts of "agreement": half continue a story, half answer a question
WORDS = 8  # of a story's beginning
LIMIT = 80  # tokens of an answer
SPARE = 16  # tokens by which a tool call may exceed the right one
WINDOWS = 4  # a text has at least this many times the tokens that caches keep exact


@dataclass(frozen=True)
class Prompt:
    """limit: most tokens of the reply. line: without a chat template only its first line counts.
    answer, values: if given, their likelihood is measured too."""

    tokens: list[int]
    limit: int
    line: bool = False
    answer: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """reply: of the model. logs: log probabilities of the tokens of the right values."""

    reply: Reply
    logs: tuple[float, ...] = ()


Judge = Callable[[list[Written], list[Written]], dict]  # (an arm's, the baseline's) -> result


def parts(arms: Arms, options: TaskOptions) -> list[Part]:
    """Return the three parts. Raises UserError for options that cannot be used."""
    retrieval.check(options)
    context = _context(arms, options)
    one = replace(options, samples=1)  # document, about which all questions are
    document = partial(retrieval.texts(arms.loaded, one), context, 0)
    makers = {"agreement": _agreement, "answers": _answers, "structured": _structured}
    counts = {
        "agreement": CONTINUED,
        "answers": len(passages.questions(_fewer(options))),
        "structured": _fewer(options),
    }
    asks = {
        "seed": SEED,
        "text": retrieval.SEED,
        "context": context,
        "questions": options.questions,
        "tokens": options.tokens,
    }
    return [
        Part(
            "generation",
            name,
            partial(_run, make, document, options, context, {}),
            counts[name],
            asks,
            str(context),
        )
        for name, make in makers.items()
    ]


def _fewer(options: TaskOptions) -> int:
    """Return half of retrieval's questions, because replies are written token by token."""
    return -(-options.questions // 2)


def _context(arms: Arms, options: TaskOptions) -> int:
    """Return the shortest context that is mostly compressed, else the longest."""
    window = max(config.window for config in arms.configs.values())
    long = [context for context in options.contexts if context >= WINDOWS * window]
    return min(long, default=max(options.contexts))


def _run(make, document, options, context, known, arms, names, progress) -> Results:
    """known: the baseline's replies, after they were made."""
    text = document().text
    asked, judge = make(arms.loaded, document(), options)
    begin = prompts.prefix(arms.loaded, text)
    if BASELINE not in names and BASELINE not in known:
        known[BASELINE] = _replies(arms, BASELINE, begin, asked, lambda n: None)
    out = {}
    for name in sorted(names, key=lambda name: name != BASELINE):
        got = known[BASELINE] if name == BASELINE and name in known else None
        got = got or _replies(arms, name, begin, asked, progress)
        if name == BASELINE:
            known[BASELINE] = got
        out[name] = {"context": context, "tokens": len(begin), **judge(got, known[BASELINE])}
    return out


def _replies(
    arms: Arms, name: str, begin: list[int], asked: list[Prompt], progress: Progress
) -> list[Written]:
    """Return the arm's reply to each prompt. Their common beginning is read once."""
    out = []
    shared = commonprefix([prompt.tokens[:-1] for prompt in asked])
    head = commonprefix([shared, begin])
    with arms.attached(name) as loaded:
        cache = feed.branch(arms.prefixes.read(loaded, name, head))
        feed.extend(loaded, cache, shared[len(head) :])
        for prompt in asked:
            rest, logs = prompt.tokens[len(shared) :], []
            if prompt.values:
                where = loaded, feed.branch(cache), rest
                logs = answers.score(*where, prompt.answer, prompt.values)
            line = prompt.line and not prompts.has_template(loaded)
            wrote = reply(loaded, feed.branch(cache), rest, prompt.limit, line=line)
            out.append(Written(wrote, tuple(log for value in logs for log in value)))
            progress(1)
    return out


def _agreement(loaded, document, options: TaskOptions) -> tuple[list[Prompt], Judge]:
    rng = Random(f"{SEED}-agreement")
    begin = prompts.prefix(loaded, document.text)
    asked = []
    for at, start in enumerate(islice(plain.sentences(rng), CONTINUED)):
        if at % 2:
            question = document.of("multi-query")[at // 2 % options.questions].question
            tokens = prompts.ask(loaded, document.text, question)
        else:
            start = " ".join(start.split()[:WORDS])
            tokens = [*begin, *prompts.encode(loaded, start)]
        asked.append(Prompt(tokens, options.tokens))
    return asked, partial(_agree, options.tokens)


def _agree(limit: int, got: list[Written], baseline: list[Written]) -> dict:
    """Count leading tokens equal to the baseline's. of: tokens that it wrote, with the end of turn.
    margin: median of the baseline's margin at the first different token; None if none differs."""
    lengths, margins = [], []
    texts = [each.reply for each in baseline]
    for ours, theirs in zip((each.reply for each in got), texts, strict=True):
        lengths.append(len(commonprefix([ours.tokens, theirs.tokens])))
        if lengths[-1] < len(theirs.tokens):
            margins.append(theirs.margins[lengths[-1]])
    of = [len(theirs.tokens) for theirs in texts]
    return {
        "limit": limit,
        "of": of,
        "lengths": lengths,
        "mean": float(mean(lengths)),
        "identical": float(mean(a == b for a, b in zip(lengths, of, strict=True))),
        "margin": median(margins) if margins else None,
    }


def _answers(loaded, document, options: TaskOptions) -> tuple[list[Prompt], Judge]:
    asked = passages.questions(_fewer(options))
    made = [Prompt(prompts.ask(loaded, document.text, a.question), LIMIT, line=True) for a in asked]

    def judge(got: list[Written], _: list[Written]) -> dict:
        groups: dict[str, dict[str, int]] = {}
        for each, question in zip(got, asked, strict=True):
            group = groups.setdefault(question.group, {"asked": 0, "right": 0})
            group["asked"] += 1
            group["right"] += question.right(each.reply.text)
        right = sum(group["right"] for group in groups.values())
        return {"asked": len(asked), "right": right, "by_group": groups}

    return made, judge


def _structured(loaded, document, options: TaskOptions) -> tuple[list[Prompt], Judge]:
    codes = [(q.keys[0], q.values[0]) for q in document.of("single")]
    count = tools.EXAMPLES + _fewer(options)
    calls = tools.calls(Random(f"{SEED}-tools"), count, codes)
    examples, wanted = calls[: tools.EXAMPLES], calls[tools.EXAMPLES :]
    first = tools.INTRODUCTION.format(request=examples[0].request)
    turns = [(first, examples[0].answer), *((c.request, c.answer) for c in examples[1:])]
    made = []
    for call in wanted:
        limit = len(prompts.encode(loaded, call.answer)) + SPARE
        tokens = prompts.ask(loaded, document.text, call.request, turns)
        answer = prompts.answer(loaded, call.answer)
        made.append(Prompt(tokens, limit, True, answer, call.values))

    def judge(got: list[Written], baseline: list[Written]) -> dict:
        parsed = [tools.parse(each.reply.text) for each in got]
        right = [p == tools.parse(c.answer) for p, c in zip(parsed, wanted, strict=True)]
        same = [a.reply.text == b.reply.text for a, b in zip(got, baseline, strict=True)]
        valid = sum(p is not None for p in parsed)
        return {
            "asked": len(wanted),
            "valid": valid,
            "right": sum(right),
            "same": sum(same),
            "likelihood": mean(log for each in got for log in each.logs),
        }

    return made, judge
