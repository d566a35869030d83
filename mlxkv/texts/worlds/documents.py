"""Training documents: pieces of text, each with its weight in the loss."""

from collections.abc import Callable, Iterator
from random import Random

from mlxkv.texts.worlds.chat import SYSTEMS, Message, Pair, conversation, messages
from mlxkv.texts.worlds.facts import (
    CODE,
    NUMBERED,
    RELATIONS,
    Fact,
    ask,
    ask_many,
    ask_values,
    new_facts,
)
from mlxkv.texts.worlds.needles import more_values, paragraphs, scatter
from mlxkv.texts.worlds.pydocs import excerpt, python_docs
from mlxkv.texts.worlds.stories import plot, simulate, stories

Piece = tuple[str, int]  # text, weight in the loss
BOS, EOS, START, END = "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"
ANSWER = 4  # an answer weighs four times as much as text that cannot be known
CHARS_PER_TOKEN = 3.7


def render(chat: list[Message], weight: int = ANSWER) -> list[Piece]:
    """Return messages as the chat template writes them, without <bos>; answers get the weight."""
    pieces: list[Piece] = []
    system = ""
    for message in chat:
        content = message["content"].strip()
        if message["role"] == "system":
            system = content + "\n\n"
        elif message["role"] == "user":
            pieces.append((f"{START}user\n{system}{content}{END}\n{START}model\n", 1))
            system = ""
        else:
            pieces += [(f"{content}{END}", weight), ("\n", 1)]
    return pieces


def conversation_document(rng: Random, room: int) -> list[Piece]:
    """Return a conversation about a few topics, sometimes about as many as there is room for."""
    system = rng.choice(SYSTEMS) if rng.random() < 0.15 else ""
    topics = room // 180 if room > 1000 and rng.random() < 0.3 else 3
    return render(messages(conversation(rng, topics), system), weight=3)


def story_document(rng: Random) -> list[Piece]:
    """Return one to four stories."""
    source = stories(rng)
    return [("\n\n".join(next(source) for _ in range(rng.randrange(1, 5))) + "\n", 1)]


def _fact_groups(rng: Random, n: int) -> list[list[Fact]]:
    """Return groups of facts of one form each, about `n` together; some keys have several values."""
    groups: list[list[Fact]] = []
    while n > 0:
        one_form = rng.random() < 0.5
        relation = CODE if rng.random() < 0.4 else rng.choice(RELATIONS)
        size = n if one_form else min(n, rng.randrange(1, 9))
        facts = new_facts(rng, relation, size)
        if rng.random() < 0.2 and relation in NUMBERED:
            facts = [
                f
                for first in facts[: max(1, size // 3)]
                for f in more_values(rng, first, rng.randrange(2, 4))
            ]
        groups.append(facts)
        n -= len(facts)
    return groups


def _ask_all(
    rng: Random, groups: list[list[Fact]], place: dict[int, int], share: float
) -> list[tuple[int, Pair]]:
    """Return questions as (place of the last fact needed, (question, answer))."""
    asked: list[tuple[int, Pair]] = []
    for facts in groups:
        by_key: dict[str, list[Fact]] = {}
        for fact in sorted(facts, key=lambda f: place[id(f)]):
            by_key.setdefault(fact.key, []).append(fact)
        singles = [same[0] for same in by_key.values() if len(same) == 1]
        for same in by_key.values():
            if rng.random() < share:
                pair = ask(rng, same[0]) if len(same) == 1 else ask_values(rng, same)
                asked.append((max(place[id(f)] for f in same), pair))
        for _ in range(1 + len(singles) // 12):
            if len(singles) >= 2 and rng.random() < 0.6:
                some = rng.sample(singles, min(len(singles), rng.choice((2, 3, 4, 4))))
                asked.append((max(place[id(f)] for f in some), ask_many(rng, some)))
    rng.shuffle(asked)
    return asked


def retrieval_document(
    rng: Random,
    tokens: int,
    docs: list[str],
    filler: Callable[[Random, int], list[str]] | None = None,
) -> list[Piece]:
    """Return a text of about `tokens` tokens with facts anywhere, asked in its middle and at its end.

    filler: hides the facts in another text than stories: called with the tokens wanted, it returns
    pieces of text, each with the white space after it; facts are put between them.
    """
    most = max(2, tokens // 48)
    n = max(2, int(most ** rng.uniform(0.3, 1.0)))
    groups = _fact_groups(rng, n)
    facts = [fact for group in groups for fact in group]
    share = rng.uniform(0.5, 1.0)
    room = max(8, int(tokens - len(facts) * (17 + 45 * share)))  # tokens left for the filler
    chars, sentences = int(room * CHARS_PER_TOKEN), []
    if filler:
        chars, sentences = 0, filler(rng, room)
    while chars > 0:
        if rng.random() < 0.04:
            new = [excerpt(rng, docs, 600)]
        else:
            new = (plot(rng) if rng.random() < 0.75 else simulate(rng)).sentences
        sentences += new
        chars -= sum(map(len, new)) + len(new)
    sentences, places = scatter(rng, sentences, facts)
    place = {id(fact): p for fact, p in zip(facts, places, strict=True)}
    asked = _ask_all(rng, groups, place, share)
    if not filler:
        return _compose(rng, sentences, asked, paragraphs)
    for at in sorted(places):
        own_line = at > 0 and sentences[at - 1].endswith("\n")
        sentences[at] += "\n" if own_line else " "
    return _compose(rng, sentences, asked, lambda _, some: "".join(some).strip("\n"))


def _compose(
    rng: Random,
    sentences: list[str],
    asked: list[tuple[int, Pair]],
    join: Callable[[Random, list[str]], str],
) -> list[Piece]:
    """Return text with some questions in its middle and the rest at its end, as a chat or plain text."""
    early = rng.choice((0.0, 0.3, 0.3, 0.5))
    chat = rng.random() < 0.8
    pieces: list[Piece] = []
    turn, start = "", 0
    middle = [(rng.randrange(p, len(sentences)), pair) for p, pair in asked if rng.random() < early]
    taken = {id(pair) for _, pair in middle}
    split_turns = chat and rng.random() < 0.5
    for place, (question, answer) in sorted(middle, key=lambda item: item[0]):
        text = join(rng, sentences[start : place + 1])
        start = place + 1
        if split_turns:
            turn = f"{text}\n\n{question}" if text else question
            pieces += render(messages([(turn, answer)]))
        else:
            text += "\n\n" if text else ""
            pieces += [(f"{text}Question: {question}\nAnswer:", 1), (f" {answer}\n\n", ANSWER)]
    rest = join(rng, sentences[start:])
    rest += "\n\n" if rest else ""
    late = [pair for _, pair in asked if id(pair) not in taken]
    if not chat or not late:
        pieces += [(rest, 1)] if rest else []
        for question, answer in late:
            pieces += [(f"Question: {question}\nAnswer:", 1), (f" {answer}\n", ANSWER)]
        return pieces
    last = render(messages([(rest + late[0][0], late[0][1]), *late[1:]]))
    if pieces and not split_turns:  # the whole text so far belongs to the user's first turn
        start_of_turn, (first, weight) = f"{START}user\n", last[0]
        return [(start_of_turn, 1), *pieces, (first.removeprefix(start_of_turn), weight), *last[1:]]
    return pieces + last


def document(rng: Random, room: int, docs: list[str]) -> list[Piece]:
    """Return a training document of at most about `room` tokens."""
    roll = rng.random()
    if room >= 160 and roll < (0.5 if room <= 512 else 0.6):
        size = room if room > 512 else int(room * rng.choice((0.45, 0.85, 0.85)))
        return retrieval_document(rng, size, docs)
    if roll < 0.93:
        return conversation_document(rng, room)
    if roll < 0.96:
        return story_document(rng)
    return [(excerpt(rng, docs, 4 * min(room, 1500)) + "\n", 1)]


def documents(rng: Random, length: int) -> Iterator[list[Piece]]:
    """Yield training documents endlessly, each of at most about `length` tokens."""
    docs = python_docs()
    while True:
        yield document(rng, length, docs)
