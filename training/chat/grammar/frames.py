"""Facts made of the frames in frames.txt: alone, several of one frame, or one of them corrected."""

from functools import cache
from pathlib import Path
from random import Random

from chat.facts import Fact
from chat.grammar.phrases import POOLS, SLOT, fill, one_of, slot, tidy

FILE = Path(__file__).parent / "frames.txt"


@cache
def frames() -> list[list[str]]:
    lines = FILE.read_text().splitlines()
    return [line.split(" ## ") for line in lines if line and not line.startswith("#")]


def several(rng: Random, text: str, words: dict[str, str], count: int = 3) -> str:
    """Return some of the phrases of a text, as a Fact has them."""
    return "|".join(dict.fromkeys(tidy(fill(one_of(rng, text), words)) for _ in range(count)))


def fact(rng: Random, frame: list[str], words: dict[str, str]) -> Fact:
    """Return a frame as a fact with these words."""
    asked, checked = [], None
    for part in frame[1:]:
        if part.startswith("? "):
            name, _, rest = part[2:].partition(": ")
            forms, _, true = rest.partition(" => ")
            wrong = [
                x for x in rng.sample(POOLS.get(name.rstrip("23"), DIGITS), 4) if x != words[name]
            ]
            held = words | {name: "{}"}
            form = "|".join(tidy(fill(one_of(rng, forms), held)) for _ in range(2))
            checked = (form, fill(true, words), words[name], tuple(wrong))
            continue
        forms, _, answer = part.partition(" => ")
        asked.append((several(rng, forms, words), tidy(fill(answer, words))))
    if rng.random() < 0.3:
        rng.shuffle(asked)
    return Fact("frame", several(rng, frame[0], words), tuple(asked), "", checked)


DIGITS = [str(n) for n in range(1111, 9999, 37)]


def words_of(rng: Random, frame: list[str], but: list[dict[str, str]]) -> dict[str, str]:
    """Return a word for every slot of a frame; no word is one of those in `but`."""
    out: dict[str, str] = {}
    for name in dict.fromkeys(SLOT.findall(" ".join(frame))):
        taken = {w for words in but for w in words.values()} | set(out.values())
        word = slot(rng, name)
        while word in taken:
            word = slot(rng, name)
        out[name] = word
    return out


def some(rng: Random, count: int) -> list[Fact]:
    """Return facts of one frame with other words in every slot, mostly all told in the same way."""
    frame = rng.choice(frames())
    if rng.random() < 0.6:
        one = one_of(rng, frame[0])
        frame = [f"{one}" if rng.random() < 0.7 else frame[0], *frame[1:]]
    held: list[dict[str, str]] = []
    for _ in range(count):
        held.append(words_of(rng, frame, held))
    return [fact(rng, frame, words) for words in held]


def change(rng: Random) -> tuple[str, str, str, str]:
    """Return a fact, its correction, a question, and what is right then."""
    frame = next(
        f for f in iter(lambda: rng.choice(frames()), None) if any(p.startswith("? ") for p in f)
    )
    name = next(p for p in frame if p.startswith("? "))[2:].partition(": ")[0]
    words = words_of(rng, frame, [])
    if name == "n2":
        return change(rng)
    new = words | {name: words_of(rng, frame, [words])[name]}
    plain = [q for q in frame[1:] if not q.startswith("? ") and f"{{{name}}}" in q.split(" => ")[1]]
    forms, _, answer = next(
        (q for q in plain if f"{{{name}}}" not in q.split(" => ")[0]), plain[0]
    ).partition(" => ")
    told, later = (tidy(fill(one_of(rng, frame[0]), w)) for w in (words, new))
    true = tidy(fill(answer, new))
    return told, rng.choice((later, true)), tidy(fill(one_of(rng, forms), new)), true
