# ruff: noqa: E501, SIM905 - plain words read better than quoted ones
"""Phrases with choices in brackets, (a|b|), and slots, {name}: every call takes one of each at random."""

import re
from functools import cache
from random import Random

from chat import vocabulary as v

DIGITS = "0123456789"
POOLS = {
    "n": v.NAMES,
    "t": v.THINGS,
    "ts": v.PLURAL_THINGS,
    "c": v.COLOURS,
    "town": v.TOWNS,
    "land": v.COUNTRIES,
    "job": v.JOBS,
    "day": v.DAYS,
    "month": v.MONTHS,
    "food": v.FOODS,
    "pet": v.PETS,
    "pname": v.PET_NAMES,
    "kin": v.RELATIVES,
    "event": v.EVENTS,
    "hobby": v.HOBBIES,
    "many": v.COUNTABLE,
    "word": v.LABELS,
    "lock": v.LOCKED,
    "key": v.KEYED,
    "kind": v.KINDS,
    "clock": [f"{h}{m}" for h in range(1, 13) for m in ("", ":15", ":30", ":45", " o'clock")]
    + ["noon", "midnight"],
    "ride": "train bus plane ferry boat ship coach tram taxi flight".split(),
    "house": "shop bank library museum market office school bakery zoo pool cinema station gym café".split(),
    "act": "wake up|get up|have lunch|have dinner|go to bed|go to work|come home|go running|feed the cat|feed the birds|call home|take a walk|drink tea|leave the house|water the plants|start work|read the paper|take a bath".split(
        "|"
    ),
    "deed": "clean the car|visit my aunt|bake a cake|meet the doctor|sell the boat|wash the dog|plant a tree|start the journey|sing|dance|travel|write a letter|fix the roof|buy shoes|call the bank|mow the lawn|go fishing|feed the ducks|rest|move house|play chess|read a book|cut the hedge|build a shelf|pack the bags|cook soup|see the king|have guests|repair the bike|swim|run a race|begin the work|drive to town|pick apples|see a film|make jam".split(
        "|"
    ),
    "mood": "happy sad angry tired glad proud calm sick strong merry sleepy thirsty nervous lazy".split(),
    "num": [str(n) for n in range(2, 100)],
    "few": [str(n) for n in range(2, 21)] + v.NUMBER_WORDS[2:21],
    "at": [f"{at} the {spot}" for spot, at in v.SPOTS.items()],
    "price": [f"{n} {money}" for n in range(2, 100) for money in ("pounds", "dollars", "euros")],
}
INNER = re.compile(r"\(([^()]*)\)")
SLOT = re.compile(r"\{(\w+?)\}")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeio]|um|un)")


@cache
def options(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


def choose(rng: Random, text: str) -> str:
    """Return a phrase with one choice of every bracket; brackets may stand in brackets."""
    while m := INNER.search(text):
        text = text[: m.start()] + rng.choice(options(m.group(1))) + text[m.end() :]
    return text


def one_of(rng: Random, text: str) -> str:
    """Return one of the phrases between the bars outside of brackets, with one choice of every bracket."""
    return tidy(choose(rng, f"({text})"))


def tidy(text: str) -> str:
    """Return a sentence without doubled spaces, and with a capital."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([,.?!])", r"\1", text)
    return text[:1].upper() + text[1:]


def slot(rng: Random, name: str) -> str:
    """Return a word for a slot; {digits} makes a number of three to five digits."""
    kind = name.rstrip("23")
    if kind == "digits":
        return "".join(rng.choices(DIGITS, k=rng.choice((3, 4, 4, 4, 5))))
    return rng.choice(POOLS[kind])


def fill(text: str, words: dict[str, str]) -> str:
    """Return a text with its slots filled; "a" becomes "an" before a vowel."""
    return ARTICLE.sub(r"\1n ", SLOT.sub(lambda m: words[m.group(1)], text))


def filled(rng: Random, text: str, words: dict[str, str] | None = None) -> str:
    """Return one phrase of a text, with its slots filled at random where no word is given."""
    words = dict(words or {})
    text = one_of(rng, text)
    for name in SLOT.findall(text):
        if name not in words:
            words[name] = slot(rng, name)
    return tidy(fill(text, words))
