"""Reorder and join the messages of a chat so that chat templates accept them.

Clients send several system messages, some of them late, and two messages of one role in a row. Most templates
raise an error then, so such messages are joined, by one rule for every API. Two requirements of few templates are
checked per template: no system message, strictly alternating roles. A chat that grows keeps its prefix.
"""

from __future__ import annotations

import re
from typing import Any

BETWEEN = "\n\n"  # between joined texts of one role
OMITTED = "..."  # text of a missing turn: some templates refuse an empty one


def joined(messages: list[dict]) -> list[dict]:
    """Return messages with at most one system message, the first, and no two of a user or of the assistant in a row,
    unless calls or thoughts separate their texts.

    A later system message becomes a user's: most templates refuse it at any other position."""
    out: list[dict] = []
    texts: list[list[str]] = []
    for message in messages:
        early = all(earlier["role"] == "system" for earlier in out)
        role = "user" if message["role"] == "system" and not early else message["role"]
        if out and _belongs(out[-1], message | {"role": role}):
            if out[-1].get("name") != message.get("name"):
                out[-1].pop("name", None)
                message = {key: value for key, value in message.items() if key != "name"}
            out[-1] = message | out[-1]
            texts[-1].append(message["content"])
        else:
            out.append(message | {"role": role})
            texts.append([message["content"]])
    return [
        message | {"content": BETWEEN.join(filter(None, contents))}
        for message, contents in zip(out, texts, strict=True)
    ]


def _belongs(last: dict, message: dict) -> bool:
    """Return whether a message continues the last one."""
    if last["role"] != message["role"] or message["role"] == "tool":
        return False
    return not last.get("tool_calls") and not any(message.get(name) for name in NAMES)


def takes_system(tokenizer: Any, template: dict) -> bool:
    """Return whether the chat template renders system messages: some raise an error, some omit them. template: its
    other arguments."""
    words = "Answer briefly"
    chat = [{"role": "system", "content": words}, {"role": "user", "content": "Hi"}]

    def text(messages: list[dict]) -> str | None:
        try:
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **template
            )
        except Exception:  # templates may raise any error
            return None

    if not tokenizer.has_chat_template or words in (text(chat) or ""):
        return True
    return text(chat[1:]) is None  # it wants something else


def without_system(messages: list[dict]) -> list[dict]:
    """Return messages from `joined`, with the system message moved into the first user message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [system | {"role": "user"}, *rest]
    texts = system["content"], rest[0]["content"]
    return [rest[0] | {"content": BETWEEN.join(filter(None, texts))}, *rest[1:]]


def alternating(messages: list[dict]) -> list[dict]:
    """Return messages from `joined` that begin with a user and alternate between user and assistant. Calls and their
    results do not count as turns."""
    out = messages[: bool(messages) and messages[0]["role"] == "system"]
    rest, speaker = messages[len(out) :], "assistant"
    if not rest or rest[0]["role"] != "user":
        rest = [{"role": "user", "content": OMITTED}, *rest]
    for message in rest:
        role = message["role"]
        if role == "user" or (role == "assistant" and not message.get("tool_calls")):
            if role == speaker:
                listener = "assistant" if role == "user" else "user"
                out.append({"role": listener, "content": OMITTED})
            speaker = role
        out.append(message)
    return out


# -- thoughts of earlier turns: passed to a chat template apart from the answers, under the template's own name
#
# The template decides which of them it writes into a prompt: Qwen3, GLM and gpt-oss drop those before the last
# question, others keep all. A template with neither a name nor marks for thoughts is given only the answers.


# Fields in which chat templates read the thoughts of a message: Qwen3 and GLM; Gemma 4; gpt-oss.
NAMES = ("reasoning_content", "reasoning", "thinking")
# The marks of gpt-oss, which are missing in mlx-lm's tokenizers.
HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")


class Thinking:
    """The marks around a model's thoughts, and the fields in which its chat template reads them.

    start, end: the marks around thoughts in a reply; "" for a model that does not think. names: the
    subset of NAMES that the template reads.
    """

    def __init__(self, tokenizer: Any):
        template = str(getattr(tokenizer, "chat_template", None) or "")
        marks = tuple(getattr(tokenizer, f"think_{side}", None) or "" for side in ("start", "end"))
        self.start, self.end = HARMONY if not all(marks) and HARMONY[0] in template else marks
        # A template in mlx-lm's Python code has no text to search; it reads the usual name.
        self.names = tuple(
            n for n in NAMES if re.search(rf"[.'\"]{n}\b", template or f".{NAMES[0]}")
        )
        self._cuts = bool(self.end) and self.end in template

    def message(self, text: str, is_open: bool = False) -> dict:
        """Parse a generated text into an assistant message: `content`, and `reasoning_content` if it contains thoughts.
        is_open: the prompt ended with the start mark of thoughts."""
        begins = self.start and text.lstrip().startswith(self.start)
        if not self.end or not (is_open or begins) or (self._cuts and not self.names):
            return {"role": "assistant", "content": text}
        thoughts, _, content = text.partition(self.end)
        if begins:
            thoughts = thoughts.lstrip().removeprefix(self.start)
        return {"role": "assistant", "content": content, NAMES[0]: thoughts}

    def named(self, chat: list[dict]) -> list[dict]:
        """Return the messages of a chat with the assistant's thoughts in the fields that the template reads; without
        thoughts if it reads none."""
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
