"""Small grammar helpers, and the rule that splits everything into training and test text."""

from collections.abc import Sequence
from random import Random
from zlib import crc32

SPLITS = ("train", "test")
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905

_SILENT_H = ("hour", "honest", "heir")
_YOU = ("uni", "use", "one", "euro")
_ONSETS = """b br c ch d dr f fl g gr h j k kr l m n p pr qu r s sh sk st t th tr v w y
z""".split()  # noqa: SIM905 - plain letters read better than quoted ones
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ia", "oo"]
_ENDS = ["", "", "", "l", "n", "r", "s", "x", "th", "rn", "nd", "k", "m"]


def article(word: str) -> str:
    """The word with 'a' or 'an' before it."""
    lower = word.lower()
    vowel = (lower[0] in "aeiou" and not lower.startswith(_YOU)) or lower.startswith(_SILENT_H)
    return f"{'an' if vowel else 'a'} {word}"


def listed(items: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capital(text: str) -> str:
    """The text with its first letter in upper case (the rest as it is)."""
    return text[0].upper() + text[1:]


def number(n: int) -> str:
    """Small numbers as words, larger ones in digits."""
    return NUMBERS[n] if 0 <= n < len(NUMBERS) else str(n)


def counted(n: int, singular: str, plural: str) -> str:
    """'one apple', 'three apples', 'no apples'."""
    return f"{'no' if n == 0 else number(n)} {singular if n == 1 else plural}"


def held_out(name: str) -> bool:
    """Whether a made-up name belongs to the test split: one name in eight, by its checksum."""
    return crc32(name.encode()) % 8 == 0


def combination_held_out(topic: str, said: int, asked: int) -> bool:
    """Whether stating a fact in form `said` and asking for it in form `asked` is kept for tests."""
    return (3 * said + asked + crc32(topic.encode())) % 6 == 0


def made_up_name(rng: Random, split: str = "train") -> str:
    """A pronounceable name of two to four syllables that belongs to the split."""
    pick = rng.choice
    while True:
        parts = [pick(_ONSETS) + pick(_VOWELS) for _ in range(pick((2, 2, 2, 3, 3, 4)))]
        name = ("".join(parts) + pick(_ENDS)).capitalize()
        if held_out(name) == (split == "test"):
            return name


def choose_form(rng: Random, topic: str, said: int, forms: int, split: str) -> int:
    """A way to ask for a fact that was stated in form `said`, allowed in this split."""
    wanted = split == "test"
    return rng.choice(
        [j for j in range(forms) if combination_held_out(topic, said, j) == wanted]
    )  # six forms or more always leave a choice on both sides


def ways(direct: str, indirect: str) -> tuple[str, ...]:
    """Seven ways to ask: 'where does {k} live' and 'where {k} lives' in one frame each."""
    return (
        f"{capital(direct)}?",
        f"Tell me {indirect}.",
        f"Can you tell me {indirect}?",
        f"Do you know {indirect}?",
        f"Please say {indirect}.",
        f"I want to know {indirect}.",
        f"According to the text, {direct}?",
    )
