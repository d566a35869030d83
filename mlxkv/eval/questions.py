"""A long text in plain English, access codes spread evenly between everyday sentences, and questions about them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from random import Random

# As in RULER: one key among others of its form; one key among near-identical ones; four keys in
# one answer; all values of one key.
KINDS = ("single", "multi-key", "multi-query", "multi-value")
QUERIES = 4  # keys in one question of "multi-query"


@dataclass(frozen=True)
class Question:
    """values: in their order in `answer`. keys: of the values."""

    kind: str
    question: str
    answer: str
    values: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    text: str
    questions: tuple[Question, ...]

    def of(self, kind: str) -> list[Question]:
        return [question for question in self.questions if question.kind == kind]


@dataclass(frozen=True)
class FactCounts:
    """Counts of facts in a text: `keys` with one value each (asked alone and four at a time), `near`
    near-identical keys, `lists` keys with several values."""

    keys: int
    near: int
    lists: int

    @staticmethod
    def fit(length: int, questions: int, tokens: int) -> FactCounts:
        """Return counts for a text of `length` tokens, at most half of it facts of `tokens` tokens
        each."""
        budget = max(14, length // (2 * tokens))
        limit = max(QUERIES, 3 * budget // 10)
        keys = min(limit, max(QUERIES, questions, length // 200))
        return FactCounts(
            keys, keys, min(max(2, 4 * budget // 25), max(2, questions // 2, length // 400))
        )


def spread(rng: Random, sentences: Sequence[str], groups: Sequence[Sequence[str]]) -> list[str]:
    """Put the facts of each group between `sentences`: the text is cut into as many equal stretches
    as the group has facts, and each stretch gets one."""
    placed = []
    for group in groups:
        for stretch, fact in enumerate(rng.sample(list(group), len(group))):
            gap = int((stretch + rng.random()) / len(group) * (len(sentences) + 1))
            placed.append((gap, rng.random(), fact))
    out, start = [], 0
    for gap, _, fact in sorted(placed):
        out += [*sentences[start:gap], fact]
        start = gap
    return [*out, *sentences[start:]]


def rounds(rng: Random, items: Sequence, count: int) -> list:
    """Return `count` of the items in random order; an item comes again only after all others."""
    out: list = []
    while len(out) < count:
        out += rng.sample(list(items), len(items))
    return out[:count]


def filler(source, budget: int, measure: Callable[[str], int]) -> list[str]:
    """Return sentences of `source` that fit into `budget` tokens together."""
    out: list[str] = []
    for sentence in source:
        budget -= measure(" " + sentence)
        if budget <= 0:
            return out
        out.append(sentence)
    return out


NEAR = 12  # most words on each side of near-identical keys
WORDS = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))


def fact(place: str, code: str) -> str:
    return f"The access code of the {place} is {code}."


def _upper(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def sentences(rng: Random) -> Iterator[str]:
    """Yield sentences without a digit, endlessly."""
    while True:
        words = {name: rng.choice(choices) for name, choices in WORDS["slots"].items()}
        yield _upper(rng.choice(WORDS["forms"]).format(**words))


def listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def document(rng: Random, length: int, questions: int, measure: Callable[[str], int]) -> Document:
    """Return a document of about `length` tokens by `measure`, with `questions` of each kind.

    Keys of "multi-key" come from a small table of adjectives and nouns, so that for each key there
    are others that differ in one word.
    """
    tokens = measure(" " + fact("northern warehouse", "1234567"))
    sizes = FactCounts.fit(length, questions, tokens)
    side = min(NEAR, isqrt(sizes.near - 1) + 1)  # the table is almost full
    all_words = WORDS["adjectives"], WORDS["nouns"]
    near_words = [rng.sample(words, side) for words in all_words]
    far_words = [
        [word for word in every if word not in taken]
        for every, taken in zip(all_words, near_words, strict=True)
    ]
    near = _places(rng, near_words, sizes.near)
    far = _places(rng, far_words, sizes.keys + sizes.lists)
    single, several = far[: sizes.keys], far[sizes.keys :]
    counts = {place: rng.randrange(2, 4) for place in several}
    codes = iter(rng.sample(range(1_000_000, 10_000_000), len(near) + sizes.keys + 3 * len(counts)))
    values = {place: [str(next(codes))] for place in (*near, *single)}
    values |= {place: [str(next(codes)) for _ in range(n)] for place, n in counts.items()}
    groups = [[fact(p, v) for p in places for v in values[p]] for places in (single, near, several)]
    budget = length - sum(measure(" " + sentence) for group in groups for sentence in group)
    text = _paragraphs(rng, spread(rng, filler(sentences(rng), budget, measure), groups))
    questions_asked: list[Question] = []

    def put(kind: str, pairs: list[tuple[str, str]], question: str, answer: str) -> None:
        keys, values = zip(*((f"the {place}", code) for place, code in pairs), strict=True)
        questions_asked.append(Question(kind, question, answer, values, keys))

    for kind, places in (("single", single), ("multi-key", near)):
        for place in rounds(rng, places, questions):
            (code,) = values[place]
            put(
                kind, [(place, code)], f"What is the access code of the {place}?", fact(place, code)
            )
    for _ in range(questions):
        four = rng.sample(single, QUERIES)
        pairs = [(place, values[place][0]) for place in four]
        question = f"What are the access codes of {listed([f'the {p}' for p in four])}?"
        clauses = listed([f"the access code of the {p} is {v}" for p, v in pairs])
        put("multi-query", pairs, question, f"{_upper(clauses)}.")
    for place in rounds(rng, several, questions):
        codes_in_order = sorted(values[place], key=lambda code: text.index(fact(place, code)))
        question = f"What are all the access codes of the {place}?"
        answer = f"The access codes of the {place} are {listed(codes_in_order)}."
        put("multi-value", [(place, code) for code in codes_in_order], question, answer)
    return Document(text, tuple(questions_asked))


def _places(rng: Random, words: Sequence[Sequence[str]], count: int) -> list[str]:
    """Return `count` different places, with two adjectives if one is not enough."""
    adjectives, nouns = words
    places = [f"{a} {n}" for a in adjectives for n in nouns]
    if count > len(places):
        places += [f"{a} {b} {n}" for a in adjectives for b in adjectives if a != b for n in nouns]
    return rng.sample(places, count)


def _paragraphs(rng: Random, parts: list[str]) -> str:
    out = [parts[0]]
    for sentence in parts[1:]:
        out += ["\n\n" if rng.random() < 0.1 else " ", sentence]
    return "".join(out)
