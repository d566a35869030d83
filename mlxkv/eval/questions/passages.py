"""Questions about short passages, each with one short right answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

WORDS = 15  # most words of a short answer
PLAIN = (
    ("person", "Mara left the shop at six. Tobias stayed behind to count the money.",
     "Who counted the money?", "Tobias"),
    ("thing", "On the ferry Lena sold nine baskets. She spent all she earned on a violin.",
     "What did Lena buy?", "violin"),
    ("place", "The meeting was planned for the town hall but was moved to the bakery.",
     "Where did the meeting take place?", "bakery"),
    ("number", "Of the twelve lamps on the pier, five were broken and the rest were lit.",
     "How many lamps were broken?", "five"),
    ("colour", "The roof had been red for years. Last summer Owen painted it green.",
     "What colour is the roof now?", "green"),
    ("person", "Priya taught Jonas to sail. Jonas later taught his cousin Edda.",
     "Who taught Edda to sail?", "Jonas"),
    ("thing", "The thief took neither the silver nor the clock, but only a spoon.",
     "What did the thief take?", "spoon"),
    ("place", "The letter was written in Lisbon and was opened a month later in Prague.",
     "In which city was the letter opened?", "Prague"),
    ("number", "Four trains a day stop here in winter. In summer there are nine.",
     "How many trains a day stop here in summer?", "nine"),
    ("day", "The library is closed on Monday. It opens late on Thursday.",
     "On which day is the library closed?", "Monday"),
    ("person", "Neither Ruth nor Felix could open the jar. At last Agnes did.",
     "Who opened the jar?", "Agnes"),
    ("thing", "The goat ate the hat, and the dog ran away with the scarf.",
     "What did the goat eat?", "hat"),
)  # fmt: skip


@dataclass(frozen=True)
class ShortQuestion:
    """A question whose reply is right if its first line is short and holds the answer."""

    group: str
    question: str
    answer: str

    def right(self, reply: str) -> bool:
        line = (reply.strip().splitlines() or [""])[0].lower()
        named = re.search(rf"\b{self.answer.lower()}\b", line)
        return named is not None and len(line.split()) <= WORDS


def questions(count: int) -> list[ShortQuestion]:
    """Return `count` questions, at most len(PLAIN)."""
    form = "{} {} Answer with one word."
    return [ShortQuestion(g, form.format(text, q), a) for g, text, q, a in PLAIN[:count]]
