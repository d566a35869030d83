"""Haystacks: a long text with facts anywhere in it, and questions for them.

One haystack carries many questions, so that an evaluator reads the text once and asks many times:

    stack = haystack("single", Random("my seed"), length=3000)
    for needle in stack.needles:
        prompt = f"{stack.text}\\n\\n{needle.question}"   # the user's turn
        ...                                              # compare with needle.answer, needle.values

Kinds: `single` one key among codes of the same form; `multi2`, `multi3`, `multi4` several keys in
one answer; `values` all the values of one key; `unseen` like `single`, with keys that training
never saw; `mixed` facts of all relations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from mlxkv.texts.worlds.facts import (
    CODE,
    RELATIONS,
    Fact,
    Relation,
    ask,
    ask_many,
    ask_values,
    four_digits,
    new_facts,
)
from mlxkv.texts.worlds.stories import stories

KINDS = ("single", "multi2", "multi3", "multi4", "values", "unseen", "mixed")


@dataclass(frozen=True)
class Needle:
    """A question about a haystack. values: in their order in `answer`."""

    question: str
    answer: str
    values: tuple[str, ...]
    depth: float  # of the first of its facts: 0 is the start of the text, 1 the end
    kind: str


@dataclass(frozen=True)
class Haystack:
    """A text and the questions that it answers."""

    text: str
    needles: tuple[Needle, ...]


def words(text: str) -> int:
    """Count words: the default measure of length."""
    return len(text.split())


def scatter(rng: Random, sentences: list[str], facts: list[Fact]) -> tuple[list[str], list[int]]:
    """Put the facts between sentences. Returns the new sentences and the places of the facts."""
    gaps = sorted(rng.randrange(len(sentences) + 1) for _ in facts)
    order = rng.sample(range(len(facts)), len(facts))
    out: list[str] = []
    places = [0] * len(facts)
    start = 0
    for gap, n in zip(gaps, order, strict=True):
        out += sentences[start:gap]
        places[n] = len(out)
        out.append(facts[n].sentence)
        start = gap
    return out + sentences[start:], places


def paragraphs(rng: Random, sentences: list[str]) -> str:
    """Join sentences to a text, sometimes with a new paragraph."""
    parts = [sentences[0]] if sentences else []
    for sentence in sentences[1:]:
        parts += ["\n\n" if rng.random() < 0.1 else " ", sentence]
    return "".join(parts)


def _facts(rng: Random, kind: str, n: int) -> list[Fact]:
    if kind == "mixed":
        return [f for _ in range(n) for f in new_facts(rng, rng.choice(RELATIONS), 1)]
    relation = Relation(**{**CODE.__dict__, "value": four_digits})
    if kind == "values":
        firsts = new_facts(rng, relation, max(1, n // 3))
        return [f for first in firsts for f in more_values(rng, first, rng.randrange(2, 4))]
    return new_facts(rng, relation, n, names="test" if kind == "unseen" else "train")


def more_values(rng: Random, fact: Fact, n: int) -> list[Fact]:
    """Return `n` facts with the key of `fact` and different values, its own first."""
    said = len(fact.relation.statements)
    values = {fact.value: None}
    while len(values) < n:
        values[fact.relation.value(rng)] = None
    return [Fact(fact.relation, fact.key, value, rng.randrange(said)) for value in values]


def _questions(
    rng: Random, kind: str, facts: list[Fact], places: list[int], n: int, split: str
) -> list[tuple[str, str, list[int]]]:
    indices = range(len(facts))
    if kind.startswith("multi"):
        keys = int(kind[-1])
        groups = [rng.sample(indices, keys) for _ in range(n)]
        return [(*ask_many(rng, [facts[i] for i in group]), group) for group in groups]
    if kind == "values":
        by_key: dict[str, list[int]] = {}
        for i in sorted(indices, key=lambda i: places[i]):
            by_key.setdefault(facts[i].key, []).append(i)
        groups = rng.sample(list(by_key.values()), min(n, len(by_key)))
        return [(*ask_values(rng, [facts[i] for i in group]), group) for group in groups]
    return [(*ask(rng, facts[i], split), [i]) for i in rng.sample(indices, min(n, len(facts)))]


def haystack(
    kind: str,
    rng: Random,
    length: int,
    questions: int = 16,
    facts: int | None = None,
    measure: Callable[[str], int] = words,
    split: str = "test",
) -> Haystack:
    """Return a text of about `length`, by `measure`, and questions about it.

    kind: one of KINDS. facts: how many, of one form; by default length / 100, at least 8.
    measure: for tokens, `lambda text: len(tokenizer.encode(text))`, asked once a sentence.
    split: "test" asks in the held-out ways; made-up names are held out for the kind `unseen` only.
    """
    if kind not in KINDS:
        raise ValueError(f"[haystack] unknown kind {kind!r}. Choose from: {', '.join(KINDS)}.")
    planted = _facts(rng, kind, facts or max(8, length // 100))
    left = length - sum(measure(" " + fact.sentence) for fact in planted)
    source, filler = stories(rng), []
    while left > 0:
        for sentence in next(source).replace(". ", ".\0").replace('" ', '"\0').split("\0"):
            left -= measure(" " + sentence)
            if left > 0:
                filler.append(sentence)
    sentences, places = scatter(rng, filler, planted)
    asked = _questions(rng, kind, planted, places, questions, split)
    needles = tuple(
        Needle(
            q,
            a,
            tuple(planted[i].value for i in group),
            min(places[i] for i in group) / len(sentences),
            kind,
        )
        for q, a, group in asked
    )
    return Haystack(paragraphs(rng, sentences), needles)
