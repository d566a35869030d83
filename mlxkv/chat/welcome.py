"""What `mlxkv chat` says of an embedded model: what it is, what it answers, how to get a real one."""

from __future__ import annotations

from typing import Any

from mlx.utils import tree_flatten

from mlxkv.models.catalog.aliases import CHAT

# Prompts with a word of the right answer. Each is answered right at temperature 0, with fp16 and with int4, alone
# and one after the other (tests/chat/test_welcome.py). Those of tiny-chat first, then those of the other models.
ANSWERS = {
    "Mia has a red kite. What colour is the kite?": "red",
    "what is 7 plus 5": "12",
    "Count to ten.": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "My name is Anna. What is my name?": "Anna",
    "Who are you?": "language model",
}
WORLDS = {
    "Who are you?": "small language model",
    "What is 17 plus 26?": "43",
    "What is the capital of France?": "Paris",
    "Why is the sky blue?": "light",
    "The code of Tom is 381. What is the code of Tom?": "381",
}
REAL = "qwen3-4b"


def answers(name: str) -> dict[str, str]:
    """The prompts that an embedded model answers, each with a word of the answer."""
    return ANSWERS if name == CHAT else WORLDS


def welcome(loaded: Any) -> list[str]:
    """Two lines for a model that comes with mlxkv."""
    count = sum(x.size for _, x in tree_flatten(loaded.model.parameters())) / 1e6
    return [
        f"{loaded.name} has {count:.0f} million parameters and comes with mlxkv, to try the cache without a "
        f"download; a real model: mlxkv chat -m {REAL}",
        f"it answers: {' · '.join(answers(loaded.name))}",
    ]
