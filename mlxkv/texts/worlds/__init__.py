"""Small worlds in simple English: text on which very small models are trained and judged.

    haystack(kind, rng, length)   a long text and many questions about it (kinds: needles.KINDS)
    chat_questions(split)         chats that end in a question with one right answer
    stories(rng)                  endless story paragraphs, for perplexity
    documents(rng, length)        endless training documents

Pure Python, no dependencies. The same seed gives the same text on every machine, except that
documents() mixes in the help texts of the running Python. Training and test text differ in three
ways: only training uses seeds that start with "train"; one made-up name in eight is held out
(`grammar.held_out`); and so is one in six of the pairs of a statement and a question
(`grammar.combination_held_out`).
"""

from mlxkv.texts.worlds.chat import chat_questions
from mlxkv.texts.worlds.documents import documents
from mlxkv.texts.worlds.needles import KINDS, Haystack, Needle, haystack
from mlxkv.texts.worlds.stories import stories

__all__ = ["KINDS", "Haystack", "Needle", "chat_questions", "documents", "haystack", "stories"]
