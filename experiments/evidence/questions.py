"""Ask what full precision can answer: facts planted in a document, then questions that the text goes on with.

After a document come, for each form of question, a few examples with answers and then the questions that count. The
whole is one text that is read through the cache; a question is right where every token of its answer is the
likeliest, which is what greedy decoding would have written. Answers of earlier questions stand there as they ought
to be. Forms suit models that only continue text: each fact stands once, far above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from random import Random

from experiments.evidence.texts import DOCUMENTS
from experiments.evidence.words import COLOURS, PEOPLE, PLACES, THINGS, VERBS
from mlxkv.corpora.sources import start_of

SEED = "pretrained-2"  # count it up when documents or questions change
# Examples and questions of a form; FEW: in documents of less than LONG tokens.
SHOTS, ASKED, FEW = 1, 5, 1
LONG = 3072
SHORT_TIMES = 4  # documents of less than LONG tokens from each text
ROOM = 44  # tokens of a question with its answer, at most
FAR = 0.85  # facts stand in the first share of a document
CUE, GOES_ON = 24, 6  # tokens of a passage that are repeated, and that have to follow
LEAST = 0.8  # share that full precision has to answer
PASSAGE = "passage"


@dataclass(frozen=True)
class Fact:
    """planted: what stands in the document. question, answer, end: what follows it, without a gap. The end does not
    count: where a text goes on, many tokenizers write it together with what comes next."""

    planted: str
    question: str
    answer: str
    end: str = ""


@dataclass(frozen=True)
class Form:
    """A form of question. heading: in front of its questions. draws: of DRAWS, in order. The others: of its facts,
    with {name} of a person, {first} in lower case, and what was drawn."""

    heading: str
    draws: str
    planted: str
    question: str
    answer: str
    end: str = ""

    def fact(self, rng: Random, name: str) -> Fact:
        drawn = {"name": name, "first": name.split()[0].lower()}
        drawn |= {draw: DRAWS[draw](rng) for draw in self.draws.split()}
        texts = self.planted, f"\n{self.question}", self.answer, self.end
        return Fact(*(text.format(**drawn) for text in texts))


DRAWS: dict[str, Callable[[Random], object]] = {
    "number": lambda rng: rng.randrange(10_000, 100_000),
    "place": lambda rng: rng.choice(PLACES),
    "thing": lambda rng: rng.choice(THINGS),
    "verb": lambda rng: rng.choice(VERBS),
    "value": lambda rng: f"{rng.choice(COLOURS)} {rng.choice(THINGS)}",
}
FORMS = {
    "number": Form(
        "\n\nThe locker numbers again:", "number", "The locker number of {name} is {number}.",
        "The locker number of {name} is", " {number}",
    ),
    "setting": Form(
        "\n\n# The settings again", "thing verb value", '{first}_{thing}_{verb} = "{value}"',
        '{first}_{thing}_{verb} = "', "{value}", '"',
    ),
    "function": Form(
        "\n\n# The functions again", "verb thing value",
        'def {verb}_{thing}_{first}():\n    return "{value}"',
        'def {verb}_{thing}_{first}():\n    return "', "{value}", '"',
    ),
    "record": Form(
        "\n\nThe records again:", "value", '{{"name": "{name}", "gift": "{value}"}}',
        '{{"name": "{name}", "gift": "', "{value}", '"',
    ),
    "speech": Form(
        "\n\nThe prizes again:", "value", "{name} said that the prize was a {value}.",
        "{name} said that the prize was a", " {value}", ".",
    ),
    "result": Form(
        "\n\nThe functions in use:", "thing number", "def {first}_{thing}():\n    return {number}",
        ">>> {first}_{thing}()\n", "{number}",
    ),
    "place": Form(
        "\n\nQuestions about the text:", "thing place", "{name} left the {thing} in the {place}.",
        "Question: Where did {name} leave the {thing}? Answer: in the", " {place}",
    ),
    "call": Form(
        "\n\nCalls to make:", "number", 'The extension of {name} is "{number}".',
        'User: Dial {name}.\nAssistant: <tool_call>{{"name": "dial", "arguments": {{"extension": "',
        "{number}", '"',
    ),
}  # fmt: skip
NAMES = (PASSAGE, *FORMS)


@dataclass(frozen=True)
class Asked:
    """tokens: the document with its questions behind, [T]. length: tokens of the document. spans: by form, first
    and last position + 1 of each answer that counts."""

    tokens: list[int]
    length: int
    spans: dict[str, list[tuple[int, int]]]


def per_form(context: int) -> int:
    """Return how many questions of a form count in a document."""
    return ASKED if context >= LONG else FEW


def places(context: int, documents: int) -> list[int]:
    """Return the numbers of all documents that are asked; behind DOCUMENTS come others of the same texts."""
    times = SHORT_TIMES if context < LONG else 1
    return [i + DOCUMENTS * time for time in range(times) for i in range(documents)]


def document(
    loaded, text: Sequence[int], index: int, length: int, context: int, forms: Sequence[str]
) -> Asked:
    """Return document `index` of `length` tokens, made of `text`, the tokens of real text, with questions of
    these forms. The document and its facts are the same whatever forms are asked.

    Raises ValueError if the text is too short or the facts do not fit."""
    encode = partial(loaded.tokenizer.encode, add_special_tokens=False)
    rng = Random(f"{SEED}-{context}-{index}")
    facts = _facts(rng, per_form(context) + SHOTS)
    planted = [encode(f"\n\n{fact.planted}\n\n") for fact in chain(*facts.values())]
    rng.shuffle(planted)
    start = start_of(loaded)
    budget = length - len(start) - sum(map(len, planted))
    if not 0 < budget <= len(text):
        raise ValueError(f"a document of {length} tokens has room for {budget} of {len(text)}")
    body = [*start, *_mixed(rng, list(text[-budget:]), planted, _ends(loaded))]
    tokens, spans = list(body), {}
    for form in forms:
        spans[form] = []
        if form == PASSAGE:
            pieces = [(*x, []) for x in _passages(rng, text[-budget:], per_form(context))]
        else:
            tokens += encode(FORMS[form].heading)
            pieces = [_pieces(encode, fact) for fact in facts[form]]
        for at, (question, answer, end) in enumerate(pieces):
            tokens += question
            if at >= SHOTS or form == PASSAGE:
                spans[form].append((len(tokens), len(tokens) + len(answer)))
            tokens += answer + end
    return Asked(tokens, length, spans)


def _facts(rng: Random, count: int) -> dict[str, list[Fact]]:
    """Return facts of each form, about different people."""
    first = rng.sample(PEOPLE, count * len(FORMS))
    last = [rng.choice(PEOPLE) for _ in first]
    names = iter(f"{a} {b}son" for a, b in zip(first, last, strict=True))
    return {
        name: [form.fact(rng, next(names)) for _ in range(count)] for name, form in FORMS.items()
    }


def _ends(loaded) -> Callable[[int], bool]:
    """Return whether a token ends a line."""
    return cache(lambda token: loaded.tokenizer.decode([token]).endswith("\n"))


def _mixed(rng: Random, text: list[int], planted: list[list[int]], ends) -> list[int]:
    """Return the text with the facts between its lines, in its first part."""
    limit = int(len(text) * FAR)
    places = []
    for place in sorted(rng.randrange(limit) for _ in planted):
        near = range(place, min(place + 200, limit))
        places.append(next((i + 1 for i in near if ends(text[i])), place))
    out, cursor = [], 0
    for place, fact in zip(places, planted, strict=True):
        place = max(place, cursor)
        out += text[cursor:place] + fact
        cursor = place
    return out + text[cursor:]


def _passages(
    rng: Random, text: Sequence[int], count: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield passages of the text that stand there once: a cue and what follows it."""
    once: set[tuple[int, ...]] = set()
    twice: set[tuple[int, ...]] = set()
    for i in range(len(text) - GOES_ON):
        part = tuple(text[i : i + GOES_ON])
        (twice if part in once else once).add(part)
    count_found = 0
    for _ in range(200 * count):
        at = rng.randrange(int(len(text) * FAR) - CUE - GOES_ON)
        cue, following = text[at : at + CUE], text[at + CUE : at + CUE + GOES_ON]
        parts = [tuple(text[i : i + GOES_ON]) for i in range(at, at + CUE + 1)]
        if len(set(following)) < GOES_ON - 2 or any(part in twice for part in parts):
            continue
        yield list(cue), list(following)
        count_found += 1
        if count_found == count:
            return
    raise ValueError("the text repeats itself")


def _pieces(encode: Callable[[str], list[int]], fact: Fact) -> tuple[list[int], ...]:
    """Return question and answer as the tokens of both together, and the tokens of the end."""
    question, joined = encode(fact.question), encode(fact.question + fact.answer)
    same = 0
    while same < len(question) and question[same] == joined[same]:
        same += 1
    return joined[:same], joined[same:], encode(fact.end) if fact.end else []
