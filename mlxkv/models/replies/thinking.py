"""Thoughts of earlier turns: a chat template gets them apart from the answers, under its own name for them.

What of them is written into a prompt is the template's affair: Qwen3, GLM and gpt-oss drop those from before the last
question, others keep all. A template that knows neither a name for thoughts nor their marks gets answers alone.
"""

from __future__ import annotations

import re
from typing import Any

# What chat templates call the thoughts of a message: Qwen3 and GLM; Gemma 4; gpt-oss.
NAMES = ("reasoning_content", "reasoning", "thinking")
# The marks of gpt-oss, which mlx-lm's tokenizers do not name.
HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")


class Thinking:
    """The marks by which a model writes thoughts, and the names by which its chat template reads them.

    start, end: the marks around thoughts in a reply; "" for a model that does not think. names: the ones of
    NAMES that the template reads.
    """

    def __init__(self, tokenizer: Any):
        template = str(getattr(tokenizer, "chat_template", None) or "")
        marks = tuple(getattr(tokenizer, f"think_{side}", None) or "" for side in ("start", "end"))
        self.start, self.end = HARMONY if not all(marks) and HARMONY[0] in template else marks
        # A template that is code of mlx-lm's says nothing of the kind, and reads the usual name.
        self.names = tuple(
            n for n in NAMES if re.search(rf"[.'\"]{n}\b", template or f".{NAMES[0]}")
        )
        self._cuts = bool(self.end) and self.end in template

    def message(self, text: str, is_open: bool = False) -> dict:
        """Return the message of the assistant for a text that the model wrote: `content`, and `reasoning_content`
        where it thought. is_open: the prompt ended with the mark that begins thoughts."""
        begins = self.start and text.lstrip().startswith(self.start)
        if not self.end or not (is_open or begins) or (self._cuts and not self.names):
            return {"role": "assistant", "content": text}
        thoughts, _, content = text.partition(self.end)
        if begins:
            thoughts = thoughts.lstrip().removeprefix(self.start)
        return {"role": "assistant", "content": content, NAMES[0]: thoughts}

    def named(self, chat: list[dict]) -> list[dict]:
        """Return the messages of a chat with the assistant's thoughts under the names that the template reads, and
        without thoughts where it reads none."""
        return [
            self._named(message) if message.get("role") == "assistant" else message
            for message in chat
        ]

    def _named(self, message: dict) -> dict:
        thoughts = next((message[name] for name in NAMES if message.get(name)), None)
        plain = {key: value for key, value in message.items() if key not in NAMES}
        names = self.names if thoughts else ()
        if message.get("tool_calls") and message.get("content"):
            names = tuple(name for name in names if name != "thinking")  # gpt-oss refuses both
        return plain | dict.fromkeys(names, thoughts)
