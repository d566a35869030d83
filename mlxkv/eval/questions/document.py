"""A long text with facts spread evenly over it, and questions about the facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
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
class Sizes:
    """Counts of facts in a text: `keys` with one value each (asked alone and four at a time), `near`
    near-identical keys, `lists` keys with several values."""

    keys: int
    near: int
    lists: int

    @staticmethod
    def fit(length: int, questions: int, tokens: int) -> Sizes:
        """Return counts for a text of `length` tokens, of which facts of `tokens` tokens each take
        at most half."""
        room = max(14, length // (2 * tokens))
        limit = max(QUERIES, 3 * room // 10)
        keys = min(limit, max(QUERIES, questions, length // 200))
        return Sizes(keys, keys, min(max(2, 4 * room // 25), max(2, questions // 2, length // 400)))


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
    return list(islice(out, count))


def filler(source, room: int, measure: Callable[[str], int]) -> list[str]:
    """Return sentences of `source` that fit into `room` tokens together."""
    out: list[str] = []
    for sentence in source:
        room -= measure(" " + sentence)
        if room <= 0:
            return out
        out.append(sentence)
    return out
