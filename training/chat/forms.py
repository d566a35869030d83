"""The 300 question forms: read, judge a reply, and check that the kept back ones are in no training text.

PYTHONPATH=.:training python -m chat.forms        # how many, and whether any kept back wording is generated
"""

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from chat import vocabulary as v

FILE = Path(__file__).parent / "forms.txt"
BACK = "kept back"


@dataclass(frozen=True)
class Form:
    """turns: what a user types. accepted: what the last reply may contain; exact: it has these items and no others."""

    kind: str
    kept_back: bool
    turns: tuple[str, ...]
    accepted: tuple[str, ...]
    exact: bool = False
    wrong: tuple[str, ...] = ()

    def right(self, reply: str) -> bool:
        """Whether the reply to the last turn is right."""
        if self.exact:
            items = re.findall(r"\d+|\b[A-Z]\b", reply)
            return items == self.accepted[0].split()
        if self.kind == "yes or no" or self.accepted in (("yes",), ("no",)):
            return reply.lower().startswith(self.accepted)
        return _has(reply, self.accepted) and not _has(reply, self.wrong)


def _has(text: str, words: tuple[str, ...]) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.I) for word in words)


def read(file: Path = FILE) -> list[Form]:
    """Read the forms."""
    out: list[Form] = []
    kind, back = "", False
    for line in file.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            kind, _, part = line.strip("[]").partition(", ")
            back = part == BACK
            continue
        asked, _, answer = line.rpartition(" => ")
        answer, _, wrong = answer.partition(" ! ")
        exact = answer.startswith("=")
        accepted = (answer[1:],) if exact else tuple(answer.split("|"))
        out.append(
            Form(
                kind,
                back,
                tuple(asked.split(" >> ")),
                accepted,
                exact,
                tuple(wrong.split("|")) if wrong else (),
            )
        )
    return out


def skeleton(text: str) -> str:
    """Return a text with every word of the vocabulary, every name and number as its kind, and no punctuation."""
    return " ".join(
        _SLOT.get(word, "#" if word[0].isdigit() else word)
        for word in re.findall(r"[a-z]+|\d+", text.lower().replace("'s", " s"))
    )


def _slots() -> dict[str, str]:
    lists = {
        "NAME": v.NAMES + v.PET_NAMES,
        "COLOUR": v.COLOURS + v.MORE_COLOURS + ["gray"],
        "PLACE": list(v.SPOTS),
        "TOWN": v.TOWNS,
        "LAND": list(v.COUNTRIES),
        "JOB": v.JOBS,
        "DAY": v.DAYS,
        "MONTH": v.MONTHS,
        "THING": v.THINGS + v.PLURAL_THINGS + list(v.COUNTABLE),
        "FOOD": v.FOODS,
        "PET": v.PETS,
        "#": v.NUMBER_WORDS,
        "KIN": v.RELATIVES,
        "EVENT": v.EVENTS,
    }
    return {word.lower(): slot for slot, words in reversed(lists.items()) for word in words}


_SLOT = _slots()


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; the last one is the question."""
    return [
        part for part in re.split(r"(?<=[.!?:;])\s+|\n+", text.strip()) if re.search(r"\w", part)
    ]


def generated(seed: str, dialogues: int) -> set[str]:
    """Return the skeletons of all turns in so many training dialogues, and of the sentences in them."""
    from chat.dialogues import dialogue

    rng = Random(seed)
    seen: set[str] = set()
    for _ in range(dialogues):
        for user, _ in dialogue(rng):
            seen.update(map(skeleton, (user, *sentences(user))))
    return seen


def is_generated(form: Form, seen: set[str]) -> bool:
    """Whether the last turn, or the question that ends it, is worded as a turn or a sentence that is generated."""
    return any(skeleton(text) in seen for text in (form.turns[-1], sentences(form.turns[-1])[-1]))


@cache
def held_back() -> frozenset[str]:
    """Return the skeletons of the kept back forms' last turns and questions."""
    return frozenset(
        skeleton(text)
        for form in read()
        if form.kept_back
        for text in (form.turns[-1], sentences(form.turns[-1])[-1])
    )


def shows(user: str) -> bool:
    """Whether a turn, or a sentence in it, is worded as a kept back form."""
    return any(skeleton(text) in held_back() for text in (user, *sentences(user)))


def main(dialogues: str = "300000") -> None:
    forms = read()
    back = [form for form in forms if form.kept_back]
    print(
        f"{len(forms)} forms, {len(back)} of them kept back, {len({form.kind for form in forms})} kinds"
    )
    seen = generated("overlap", int(dialogues))
    found = [form for form in back if is_generated(form, seen)]
    for form in found:
        print("generated:", " >> ".join(form.turns))
    own = sum(is_generated(form, seen) for form in forms if not form.kept_back)
    print(
        f"{len(seen):,} generated wordings: {len(found)} kept back forms "
        f"and {own} of the others are among them"
    )
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
