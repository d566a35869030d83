"""Who speaks when in a chat: a chat in any order becomes one that chat templates take.

Clients send several messages of the system, some of them late, and two of one side in a row. Most templates raise
there: by one rule they are joined, for every API alike. What few templates refuse depends on the template: no words of
the system, or a side that does not take its turn. A chat that grows stays the start of the longer one.
"""

from __future__ import annotations

import re
from typing import Any

BETWEEN = "\n\n"  # texts of one side
OMITTED = "..."  # a turn that nobody took: some templates refuse an empty one


def joined(messages: list[dict]) -> list[dict]:
    """Messages with one of the system, and first; no two of a user or of the assistant in a row, unless calls or
    thoughts stand between their texts.

    What the system says later on becomes a user's: most templates raise at any other place."""
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
    """Return whether a message goes on with the last one."""
    if last["role"] != message["role"] or message["role"] == "tool":
        return False
    return not last.get("tool_calls") and not any(message.get(name) for name in NAMES)


def takes_system(tokenizer: Any, template: dict) -> bool:
    """Return whether the chat template writes what the system says: some raise, some leave it out. template: what it
    is given besides messages."""
    words = "Answer briefly"
    chat = [{"role": "system", "content": words}, {"role": "user", "content": "Hi"}]

    def text(messages: list[dict]) -> str | None:
        try:
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **template
            )
        except Exception:  # templates raise anything
            return None

    if not tokenizer.has_chat_template or words in (text(chat) or ""):
        return True
    return text(chat[1:]) is None  # it wants something else


def without_system(messages: list[dict]) -> list[dict]:
    """Messages that `joined` has made, with the words of the system in front of the first question."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [system | {"role": "user"}, *rest]
    texts = system["content"], rest[0]["content"]
    return [rest[0] | {"content": BETWEEN.join(filter(None, texts))}, *rest[1:]]


def alternating(messages: list[dict]) -> list[dict]:
    """Messages that `joined` has made, in which a user comes first, and user and assistant take turns. Calls and their
    results are no turns."""
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


# -- thoughts of earlier turns: a chat template gets them apart from the answers, under its own name for them
#
# What of them is written into a prompt is the template's affair: Qwen3, GLM and gpt-oss drop those from before the last
# question, others keep all. A template that knows neither a name for thoughts nor their marks gets answers alone.


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
