"""A document of the small worlds, for models that were trained on them: codes in a long story.

All kinds of questions share one text, which is read once, and the facts of each kind are at even depths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

from mlxkv.errors import UserError
from mlxkv.eval.questions.document import (
    QUERIES,
    Document,
    Question,
    Sizes,
    depth_of,
    filler,
    rounds,
    spread,
)
from mlxkv.texts.worlds.facts import (
    CODE,
    Fact,
    ask,
    ask_many,
    ask_values,
    more_values,
    new_facts,
)
from mlxkv.texts.worlds.stories import stories

FACT = 17  # tokens of a fact, about
_ENDS = re.compile(r"(?<=\n)|(?<=[.!?] )")  # of a line, of a sentence


def document(
    rng: Random,
    length: int,
    questions: int,
    measure: Callable[[str], int],
    text: str | None = None,
) -> Document:
    """Return a document of about `length` tokens by `measure`, with `questions` of each kind.

    Keys of "multi-key" are made-up names that training never saw. text: where the facts are put, as
    long as it has to be or longer, in place of stories; its line breaks stay. Raises UserError if it
    is too short.
    """
    sizes = Sizes.fit(length, questions, FACT)
    seen = new_facts(rng, CODE, sizes.keys + sizes.lists)
    single, firsts = seen[: sizes.keys], seen[sizes.keys :]
    near = new_facts(rng, CODE, sizes.near, names="test")
    lists = [more_values(rng, first, rng.randrange(2, 4)) for first in firsts]
    groups = [single, near, [fact for same in lists for fact in same]]
    room = length - sum(measure(" " + fact.sentence) for group in groups for fact in group)
    said = [[fact.sentence for fact in group] for group in groups]
    if text is None:
        made = _paragraphs(rng, spread(rng, filler(_sentences(rng), room, measure), said))
    else:
        made = _inside(rng, text, room, measure, said)
    depth = depth_of(made)
    asked: list[Question] = []

    def put(kind: str, facts: list[Fact], question: str, answer: str) -> None:
        values, keys = tuple(f.value for f in facts), tuple(f.key for f in facts)
        depths = tuple(depth(fact.sentence) for fact in facts)
        asked.append(Question(kind, question, answer, values, keys, depths))

    for fact in rounds(rng, single, questions):
        put("single", [fact], *ask(rng, fact, "test"))
    for fact in rounds(rng, near, questions):
        put("multi-key", [fact], *ask(rng, fact, "test"))
    fours = rounds(rng, single, questions * QUERIES)
    for at in range(questions):
        four = _apart(fours[at * QUERIES : (at + 1) * QUERIES], single)
        put("multi-query", four, *ask_many(rng, four))
    for same in rounds(rng, lists, questions):
        in_order = sorted(same, key=lambda fact: depth(fact.sentence))
        put("multi-value", in_order, *ask_values(rng, in_order))
    return Document(made, tuple(asked))


def _inside(rng: Random, text: str, room: int, measure, groups: list[list[str]]) -> str:
    """Put the facts of each group between the lines and sentences of `room` tokens of `text`."""
    pieces = [piece for piece in _ENDS.split(text) if piece]
    own = filler(pieces, room, measure)
    if len(own) == len(pieces):
        raise UserError(
            f"[needles] the text around the facts is too short; got {len(text)} characters; it has to "
            f"fill {room} tokens; name a longer one"
        )
    facts = {fact for group in groups for fact in group}
    out, gap = [], "\n"
    for piece in spread(rng, own, groups):
        if piece not in facts:
            gap = "\n" if piece.endswith("\n") else " "
        out.append(f"{piece}{gap}" if piece in facts else piece)
    return "".join(out)


def _paragraphs(rng: Random, sentences: list[str]) -> str:
    """Join sentences to a text, sometimes with a new paragraph."""
    parts = [sentences[0]] if sentences else []
    for sentence in sentences[1:]:
        parts += ["\n\n" if rng.random() < 0.1 else " ", sentence]
    return "".join(parts)


def _sentences(rng: Random) -> Iterator[str]:
    for story in stories(rng):
        yield from story.replace(". ", ".\0").replace('" ', '"\0').split("\0")


def _apart(facts: list[Fact], others: list[Fact]) -> list[Fact]:
    """Return `facts`, with a repeated fact replaced by one of `others`."""
    out: list[Fact] = []
    for fact in [*facts, *others]:
        if fact not in out and len(out) < len(facts):
            out.append(fact)
    return out
