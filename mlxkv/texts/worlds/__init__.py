"""Small worlds in simple English: stories, facts and chats for very small models (`mlxkv eval --needles worlds`).

    stories(rng)           endless story paragraphs
    chat_questions(split)  chats that end in a question with one right answer

Pure Python, no dependencies. The same seed gives the same text on every machine. The fixture models of the tests
were trained on such text, and what evaluates them differs in three ways: no seed that starts with "train"; one
made-up name in eight is held out (`grammar.held_out`); and so is one in six of the pairs of a statement and a
question (`grammar.combination_held_out`).
"""

from mlxkv.texts.worlds.chat import chat_questions
from mlxkv.texts.worlds.stories import stories

__all__ = ["chat_questions", "stories"]
