"""Going on with a reply that was cut off: its text stands behind the prompt, where the model wrote it."""

from __future__ import annotations

from os.path import commonprefix
from typing import Any

from mlxkv.models.prompt_escaping import PromptEscaper, pieces


def continued(
    tokenizer: Any, escaper: PromptEscaper, prompt: tuple, parts: list[str], reply: dict
) -> tuple:
    """Return the prompt of a chat with the start of its reply behind it, encoded as one text.

    tokenizer: mlx-lm's wrapper. prompt: (tokens, segments of them, state that a reply begins in) of the messages
    before. parts: its text, in pieces. reply: the last message: `content`, and `reasoning` (or `reasoning_content`)
    where the model reasons; without content it is the reasoning that goes on. Raises ValueError where there is
    nothing to go on with.
    """
    tokens, segments, state = prompt
    text, state = _text(tokenizer, state, reply)
    if not text:
        raise ValueError("continue_final_message needs a reply with text to go on with")
    mark, (chat,) = escaper.marked([{"role": "assistant", "content": text}])
    first, *tail = pieces(chat[0]["content"], mark)
    # A chat template writes its own first token.
    begins = not tokenizer.has_chat_template
    complete = escaper.encode([*parts[:-1], parts[-1] + first, *tail], add_special_tokens=begins)
    shared, at, out = len(commonprefix([tokens, complete])), 0, []
    for segment in segments[:-1]:
        if at + len(segment) > shared:
            break
        out.append(segment)
        at += len(segment)
    return complete, [*out, complete[at:]], state


def _text(tokenizer: Any, state: str, reply: dict) -> tuple[str, str]:
    """Return the text of the start of a reply with its marks, and the state in which it goes on."""
    content = reply.get("content") or ""
    if not getattr(tokenizer, "has_thinking", False):
        return content, state
    reasoning = reply.get("reasoning") or reply.get("reasoning_content") or ""
    opened = state == "reasoning"  # templates of some models write the mark themselves
    text = reasoning if opened or not reasoning else tokenizer.think_start + reasoning
    if not content:
        return text, "reasoning"
    if opened or reasoning:
        text += tokenizer.think_end
    return text + content, "normal"
