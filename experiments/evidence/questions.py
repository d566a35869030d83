"""Ask what full precision can answer: facts planted in a document, then questions that the text goes on with.

After a document come, for each form of question, a few examples with answers and then the questions that count. The
whole is one text that is read through the cache; a question is right where every token of its answer is the
likeliest, which is what greedy decoding would have written. Answers of earlier questions stand there as they ought
to be. Forms suit models that only continue text: each fact stands once, far above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from experiments.evidence.texts import DOCUMENTS
from experiments.evidence.words import COLOURS, PEOPLE, PLACES, THINGS, VERBS

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


def _numbers(rng: Random, name: str) -> Fact:
    number = rng.randrange(10_000, 100_000)
    start = f"The locker number of {name} is"
    return Fact(f"{start} {number}.", f"\n{start}", f" {number}")


def _settings(rng: Random, name: str) -> Fact:
    key = f"{name.split()[0].lower()}_{rng.choice(THINGS)}_{rng.choice(VERBS)}"
    value = _value(rng)
    return Fact(f'{key} = "{value}"', f'\n{key} = "', f"{value}", '"')


def _value(rng: Random) -> str:
    return f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"


def _functions(rng: Random, name: str) -> Fact:
    called = f"{rng.choice(VERBS)}_{rng.choice(THINGS)}_{name.split()[0].lower()}"
    value = _value(rng)
    planted = f'def {called}():\n    return "{value}"'
    return Fact(planted, f'\ndef {called}():\n    return "', f"{value}", '"')


def _evaluated(rng: Random, name: str) -> Fact:
    called = f"{name.split()[0].lower()}_{rng.choice(THINGS)}"
    number = rng.randrange(10_000, 100_000)
    planted = f"def {called}():\n    return {number}"
    return Fact(planted, f"\n>>> {called}()\n", str(number))


def _records(rng: Random, name: str) -> Fact:
    start, value = f'{{"name": "{name}", "gift": "', _value(rng)
    return Fact(f'{start}{value}"}}', f"\n{start}", f"{value}", '"')


def _said(rng: Random, name: str) -> Fact:
    start, value = f"{name} said that the prize was a", _value(rng)
    return Fact(f"{start} {value}.", f"\n{start}", f" {value}", ".")


def _towns(rng: Random, name: str) -> Fact:
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    planted = f"{name} left the {thing} in the {place}."
    return Fact(
        planted, f"\nQuestion: Where did {name} leave the {thing}? Answer: in the", f" {place}"
    )


def _calls(rng: Random, name: str) -> Fact:
    number = rng.randrange(10_000, 100_000)
    question = f'\nUser: Dial {name}.\nAssistant: <tool_call>{{"name": "dial", "arguments": {{"extension": "'
    return Fact(f'The extension of {name} is "{number}".', question, f"{number}", '"')


FORMS: dict[str, Callable[[Random, str], Fact]] = {
    "number": _numbers,
    "setting": _settings,
    "function": _functions,
    "record": _records,
    "speech": _said,
    "result": _evaluated,
    "place": _towns,
    "call": _calls,
}
NAMES = (PASSAGE, *FORMS)
HEADINGS = {
    "number": "\n\nThe locker numbers again:",
    "setting": "\n\n# The settings again",
    "function": "\n\n# The functions again",
    "record": "\n\nThe records again:",
    "speech": "\n\nThe prizes again:",
    "result": "\n\nThe functions in use:",
    "place": "\n\nQuestions about the text:",
    "call": "\n\nCalls to make:",
}


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
    encode = _encoder(loaded)
    rng = Random(f"{SEED}-{context}-{index}")
    facts = _facts(rng, per_form(context) + SHOTS)
    planted = [
        encode(f"\n\n{fact.planted}\n\n")
        for facts_of_form in facts.values()
        for fact in facts_of_form
    ]
    rng.shuffle(planted)
    bos = getattr(loaded.tokenizer, "bos_token_id", None)
    start = [] if bos is None else [bos]
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
            tokens += encode(HEADINGS[form])
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
    return {form: [make(rng, next(names)) for _ in range(count)] for form, make in FORMS.items()}


def _encoder(loaded) -> Callable[[str], list[int]]:
    return lambda text: loaded.tokenizer.encode(text, add_special_tokens=False)


def _ends(loaded) -> Callable[[int], bool]:
    """Return whether a token ends a line."""
    ends_line: dict[int, bool] = {}

    def ends(token: int) -> bool:
        if token not in ends_line:
            ends_line[token] = loaded.tokenizer.decode([token]).endswith("\n")
        return ends_line[token]

    return ends


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
