"""A long text with facts spread evenly over it, and questions about them. No framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

# As in RULER: one key among others of its form; one key among near-identical ones; four keys in
# one answer; all the values of one key.
KINDS = ("single", "multi-key", "multi-query", "multi-value")
QUERIES = 4  # keys in one question of "multi-query"


@dataclass(frozen=True)
class Question:
    """values stand in `answer` in this order. keys: of each. depths: where the fact of each stands
    in the text, 0 its start, 1 its end."""

    kind: str
    question: str
    answer: str
    values: tuple[str, ...]
    keys: tuple[str, ...]
    depths: tuple[float, ...]


@dataclass(frozen=True)
class Document:
    text: str
    questions: tuple[Question, ...]

    def of(self, kind: str) -> list[Question]:
        return [question for question in self.questions if question.kind == kind]


@dataclass(frozen=True)
class Sizes:
    """Facts in a text: `keys` with one value each (asked alone and by fours), `near` near-identical
    ones, `lists` keys with several values."""

    keys: int
    near: int
    lists: int

    @staticmethod
    def fit(length: int, questions: int, tokens: int) -> Sizes:
        """For a text of `length` tokens and facts of `tokens` tokens each, which take half of it at
        most."""
        room = max(14, length // (2 * tokens))
        most = max(QUERIES, 3 * room // 10)
        keys = min(most, max(QUERIES, questions, length // 200))
        return Sizes(keys, keys, min(max(2, 4 * room // 25), max(2, questions // 2, length // 400)))


def spread(rng: Random, sentences: Sequence[str], groups: Sequence[Sequence[str]]) -> list[str]:
    """`sentences` with those of each group put between them: one in each of as many equal
    stretches of the text as the group has."""
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
    """`count` of the items in random order, each again only when all have been taken."""
    out: list = []
    while len(out) < count:
        out += rng.sample(list(items), len(items))
    return list(islice(out, count))


def depth_of(text: str) -> Callable[[str], float]:
    """Where a sentence begins in the text, 0 .. 1."""
    return lambda sentence: text.index(sentence) / len(text)


def filler(source, room: int, measure: Callable[[str], int]) -> list[str]:
    """Sentences of `source` that take `room` tokens together, the one too many left out."""
    out: list[str] = []
    for sentence in source:
        room -= measure(" " + sentence)
        if room <= 0:
            return out
        out.append(sentence)
    return out
