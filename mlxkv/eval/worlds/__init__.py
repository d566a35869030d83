"""Small worlds in simple English: the text on which our own models are trained and judged.

    haystack(kind, rng, length)   a long text and many questions about it (kinds: needles.KINDS)
    chat_questions(split)         chats that end in a question with one right answer
    stories(rng)                  endless story paragraphs, for perplexity
    documents(rng, length)        endless training documents

Pure Python, no dependencies; the same seed gives the same text on every machine (documents() mixes
in the help texts of the running Python and varies with its version). Training and test text are
kept apart in three ways: only training uses seeds that begin with "train", one made-up name in
eight is held out (`grammar.held_out`), and so is one in six of the pairs of how a fact is stated
and how it is asked (`grammar.combination_held_out`).
"""

from mlxkv.eval.worlds.chat import chat_questions
from mlxkv.eval.worlds.documents import documents
from mlxkv.eval.worlds.needles import KINDS, Haystack, Needle, haystack
from mlxkv.eval.worlds.stories import stories

__all__ = ["KINDS", "Haystack", "Needle", "chat_questions", "documents", "haystack", "stories"]
