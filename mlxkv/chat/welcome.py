"""What `mlxkv chat` says of the embedded model, which is no assistant: what it is for, and what it can answer."""

from __future__ import annotations

from typing import Any

from mlxkv.models.catalog.shapes import parameters

# Each is answered right at temperature 0, with fp16 and with int4 (tests/chat/test_welcome.py).
ANSWERS = {
    "Who are you?": "small language model",
    "What is 17 plus 26?": "43",
    "What is the capital of France?": "Paris",
    "Why is the sky blue?": "light",
    "The code of Tom is 381. What is the code of Tom?": "381",
}
REAL = "qwen3-4b"


def welcome(loaded: Any) -> list[str]:
    """Two lines for a model that comes with mlxkv."""
    count = parameters(loaded.config) / 1e6
    return [
        f"{loaded.name} has {count:.0f} million parameters and comes with mlxkv, to try the cache without a "
        f"download; a real model: mlxkv chat -m {REAL}",
        f"it answers: {' · '.join(ANSWERS)}",
    ]
