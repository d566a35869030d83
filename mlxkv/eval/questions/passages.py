"""Questions with one short right answer: held-out chats of the small worlds for models trained on
them, short passages in plain English for other models."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlxkv.eval.questions.prompts import Turn
from mlxkv.texts.worlds import chat_questions

WORDS = 15  # most words of a short answer
GROUPS = ("about you", "about a story", "about a story", "drill", "drill")  # of chat_questions
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
    """turns: of the chat before it. exact: the whole reply must be the answer; otherwise its first
    line must hold the answer and be short."""

    group: str
    question: str
    answer: str
    turns: tuple[Turn, ...] = ()
    exact: bool = False

    def right(self, reply: str) -> bool:
        if self.exact:
            return reply == self.answer
        line = (reply.strip().splitlines() or [""])[0].lower()
        held = re.search(rf"\b{self.answer.lower()}\b", line)
        return held is not None and len(line.split()) <= WORDS


def questions(needles: str, count: int) -> list[ShortQuestion]:
    """Return `count` questions, but at most len(PLAIN) for "plain"."""
    if needles == "plain":
        form = "{} {} Answer with one word."
        return [ShortQuestion(g, form.format(text, q), a) for g, text, q, a in PLAIN[:count]]
    out = []
    for at, (messages, answer) in enumerate(chat_questions("test", count)):
        said = [message["content"] for message in messages]
        turns = tuple(zip(said[:-1:2], said[1::2], strict=True))
        out.append(ShortQuestion(GROUPS[at % len(GROUPS)], said[-1], answer, turns, exact=True))
    return out
