"""Forty questions that newcomers ask a chat first, answered by a model with two caches at temperature 0.

    python -m experiments.first_questions [--model smollm2] [--kv int4] [--tokens 80]

Prints every question with the reply in full precision, and the one through `--kv` where it is another. Replies are for
a reader to judge: no list of right words would take all of them.
"""

from __future__ import annotations

import argparse
import time

from mlxkv.chat.session import Session
from mlxkv.models import load

QUESTIONS = (
    "Hi",
    "Hello, how are you?",
    "Who are you?",
    "What can you do?",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Why is the sky blue?",
    "What is 2 + 2?",
    "What is 17 plus 26?",
    "How many days are in a week?",
    "Name three fruits.",
    "List five animals that live in the sea.",
    "Tell me a joke.",
    "Write a haiku about rain.",
    "Write a short story about a dog.",
    "Translate 'good morning' to French.",
    "What is photosynthesis?",
    "Explain gravity to a child.",
    "Who wrote Romeo and Juliet?",
    "When did World War II end?",
    "What is the largest planet in the solar system?",
    "How do I boil an egg?",
    "Give me a recipe for pancakes.",
    "What is Python?",
    "Write a Python function that adds two numbers.",
    "What is machine learning?",
    "Summarise in one sentence: The cat sat on the mat all day and slept while it rained outside.",
    "Correct this sentence: He go to school yesterday.",
    "What is the opposite of hot?",
    "Give me a synonym for happy.",
    "What colour do you get when you mix blue and yellow?",
    "How far is the Moon from the Earth?",
    "What should I eat for breakfast?",
    "How can I sleep better?",
    "Write an email asking my boss for a day off.",
    "My name is Anna. What is my name?",
    "Mia has a red kite. What colour is the kite?",
    "Count to ten.",
    "What is the meaning of life?",
    "Thank you!",
)


def ask(loaded, question: str, tokens: int) -> tuple[str, Session]:
    """The reply, and the session with its times."""
    session = Session(loaded, max_tokens=tokens)
    return "".join(session.ask(question)), session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv", default="int4")
    parser.add_argument("--tokens", type=int, default=80, help="of a reply")
    args = parser.parse_args()
    full, packed = (load(args.model, kv) for kv in ("fp16", args.kv))
    same, begun, said = 0, time.perf_counter(), 0
    for number, question in enumerate(QUESTIONS, 1):
        (plain, session), (other, _) = (ask(x, question, args.tokens) for x in (full, packed))
        same += plain == other
        said += session.stats.generated_tokens
        print(f"{number}. {question}\n   fp16: {' '.join(plain.split())}", flush=True)
        if plain != other:
            print(f"   {args.kv}: {' '.join(other.split())}", flush=True)
    seconds = time.perf_counter() - begun
    print(
        f"\nthe same reply: {same} of {len(QUESTIONS)}; {said} tokens of fp16, {seconds:.0f} s in all"
    )


if __name__ == "__main__":
    main()
