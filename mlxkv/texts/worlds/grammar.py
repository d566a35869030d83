"""Grammar helpers, and the rule that splits everything into training and test text."""

from collections.abc import Sequence
from random import Random
from zlib import crc32

NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905

_SILENT_H = ("hour", "honest", "heir")
_YOU = ("uni", "use", "one", "euro")
_ONSETS = """b br c ch d dr f fl g gr h j k kr l m n p pr qu r s sh sk st t th tr v w y
z""".split()  # noqa: SIM905 - plain letters read better than quoted ones
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ia", "oo"]
_ENDS = ["", "", "", "l", "n", "r", "s", "x", "th", "rn", "nd", "k", "m"]


def article(word: str) -> str:
    """Return the word with 'a' or 'an' before it."""
    lower = word.lower()
    vowel = (lower[0] in "aeiou" and not lower.startswith(_YOU)) or lower.startswith(_SILENT_H)
    return f"{'an' if vowel else 'a'} {word}"


def listed(items: Sequence[str]) -> str:
    """Join words: 'a', 'a and b', 'a, b and c'."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capital(text: str) -> str:
    """Return the text with its first letter in upper case and the rest unchanged."""
    return text[0].upper() + text[1:]


def number(n: int) -> str:
    """Write small numbers as words and larger ones in digits."""
    return NUMBERS[n] if 0 <= n < len(NUMBERS) else str(n)


def counted(n: int, singular: str, plural: str) -> str:
    """Count things: 'one apple', 'three apples', 'no apples'."""
    return f"{'no' if n == 0 else number(n)} {singular if n == 1 else plural}"


def held_out(name: str) -> bool:
    """Return whether a made-up name belongs to the test split: one in eight, by its checksum."""
    return crc32(name.encode()) % 8 == 0


def combination_held_out(topic: str, said: int, asked: int) -> bool:
    """Return whether a fact stated in form `said` and asked for in form `asked` is kept for tests."""
    return (3 * said + asked + crc32(topic.encode())) % 6 == 0


def made_up_name(rng: Random, split: str = "train") -> str:
    """Return a pronounceable name of two to four syllables that belongs to the split."""
    pick = rng.choice
    while True:
        parts = [pick(_ONSETS) + pick(_VOWELS) for _ in range(pick((2, 2, 2, 3, 3, 4)))]
        name = ("".join(parts) + pick(_ENDS)).capitalize()
        if held_out(name) == (split == "test"):
            return name


def choose_form(rng: Random, topic: str, said: int, forms: int, split: str) -> int:
    """Return a way to ask for a fact stated in form `said`, allowed in this split."""
    wanted = split == "test"
    return rng.choice(
        [j for j in range(forms) if combination_held_out(topic, said, j) == wanted]
    )  # six forms or more always leave a choice on both sides


def ways(direct: str, indirect: str) -> tuple[str, ...]:
    """Return seven ways to ask, of a direct ('where does {k} live') and an indirect question."""
    return (
        f"{capital(direct)}?",
        f"Tell me {indirect}.",
        f"Can you tell me {indirect}?",
        f"Do you know {indirect}?",
        f"Please say {indirect}.",
        f"I want to know {indirect}.",
        f"According to the text, {direct}?",
    )
