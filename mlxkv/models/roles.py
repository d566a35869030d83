"""Who speaks when in a chat: a chat in any order becomes one that chat templates take.

Clients send several messages of the system, some of them late, and two of one side in a row. Most templates raise
there: by one rule they are joined, for every API alike. What few templates refuse depends on the template: no words of
the system, or a side that does not take its turn. A chat that grows stays the start of the longer one.
"""

from __future__ import annotations

from typing import Any

from mlxkv.models.replies.thinking import NAMES

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
    system, *layer_maps = messages
    if not layer_maps or layer_maps[0]["role"] != "user":
        return [system | {"role": "user"}, *layer_maps]
    texts = system["content"], layer_maps[0]["content"]
    return [layer_maps[0] | {"content": BETWEEN.join(filter(None, texts))}, *layer_maps[1:]]


def alternating(messages: list[dict]) -> list[dict]:
    """Messages that `joined` has made, in which a user comes first, and user and assistant take turns. Calls and their
    results are no transforms."""
    out = messages[: bool(messages) and messages[0]["role"] == "system"]
    layer_maps, speaker = messages[len(out) :], "assistant"
    if not layer_maps or layer_maps[0]["role"] != "user":
        layer_maps = [{"role": "user", "content": OMITTED}, *layer_maps]
    for message in layer_maps:
        role = message["role"]
        if role == "user" or (role == "assistant" and not message.get("tool_calls")):
            if role == speaker:
                listener = "assistant" if role == "user" else "user"
                out.append({"role": listener, "content": OMITTED})
            speaker = role
        out.append(message)
    return out
