"""Encode special tokens in the contents of a chat as plain text.

A chat template joins contents and control tokens to one text, in which a user's `<|im_start|>` looks like the
template's. So a mark is inserted into such words in contents before the template runs, and the rendered text is
split at the marks: no piece contains the word. Chats without such words are encoded as usual.
"""

from __future__ import annotations

import json
import re
from functools import partial
from os.path import commonprefix
from typing import Any

from mlxkv import untrusted

MARKS = [chr(code) for code in range(0xE000, 0xE040)]  # private use area: in no template
# A piece is encoded after one of these, as in the middle of a text: some tokenizers put a space in front of every
# text. The first that does not merge with the piece is used.
ANCHORS = ("\n", "a", ".", "|", "0")


class PromptEscaper:
    """Escapes the words that a tokenizer parses as tokens in any text: its special tokens, and the added tokens that
    its chat template writes (`<think>`, `<tool_call>`).

    words: regex that finds them; None if there are none. reply: the same for the assistant's content and reasoning,
    in which the model's own marks of thinking and tool calls are allowed. They are not allowed in tool arguments,
    which may be copied from the prompt.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        marks = [getattr(tokenizer, f"{name}_{end}", None) or "" for name, end in _REPLY]
        template = str(getattr(tokenizer, "chat_template", None) or "") + " ".join(marks)
        added = (getattr(tokenizer, "added_tokens_decoder", None) or {}).values()
        # Of the other added tokens, skip plain words: ordinary text may contain them.
        words = {
            str(token)
            for token in added
            if token.special or (str(token) in template and not str(token).strip().isalnum())
        }
        words |= set(getattr(tokenizer, "all_special_tokens", ()))
        # A normalizer may lower-case the text before tokens are matched.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        folds = normalizer is not None and any(x.special and x.normalized for x in added)
        self._special = sorted(words, key=len, reverse=True)
        self.words = _finder(words, folds)
        self.reply = _finder({word for word in words if not any(word in x for x in marks)}, folds)

    def marked(self, chat: list[dict], *values: Any) -> tuple[str | None, list]:
        """Break such words in messages and in other template inputs (tools). Returns the mark and [messages, *values];
        if there are no such words, the mark is None and the inputs are returned unchanged."""
        texts: list[str] = []
        chat = [_with_arguments(message) for message in chat]
        self._each_text(
            chat, values, lambda text, words: texts.append(text) if words.search(text) else 0
        )
        if not texts:
            return None, [chat, *values]
        everything = json.dumps([chat, values], ensure_ascii=False, default=str)
        mark = next((mark for mark in MARKS if mark not in everything), None)
        if mark is None:
            raise ValueError(
                "every character of private use that could mark a place is in the text"
            )
        marked = self._each_text(chat, values, lambda text, words: words.sub(rf"\g<1>{mark}", text))
        return mark, marked

    def _each_text(self, chat: list[dict], values: tuple, change) -> list:
        """Return a copy with every text replaced by change(text, words)."""
        if self.words is None:
            return [chat, *values]
        out = []
        for message in chat:
            own = self.reply if message.get("role") == "assistant" else self.words
            out.append(
                {
                    name: _mapped(value, change, self.words if name == "tool_calls" else own)
                    for name, value in message.items()
                }
            )
        return [out, *(_mapped(value, change, self.words) for value in values)]

    def render(self, chat: list[dict], **options) -> list[str]:
        """Return the text of the chat template, in pieces to encode one by one. options: arguments of
        `apply_chat_template`. Raises what the template raises."""
        mark, (chat,) = self.marked(chat)
        return pieces(self._tokenizer.apply_chat_template(chat, tokenize=False, **options), mark)

    def encode(
        self, parts: list[str], add_special_tokens: bool = False, context: str = ""
    ) -> list[int]:
        """Return the tokens of a text in pieces. add_special_tokens: add the first token, unless the text begins with
        it, as in mlx-lm. context: the preceding text."""
        out: list[int] = []
        for i, part in enumerate(parts):
            if i or context:
                out += self._continue(parts[i - 1] if i else context, part)
                continue
            begin = getattr(self._tokenizer, "bos_token", None)
            first = add_special_tokens and not (begin and part.startswith(begin))
            out += self._tokenizer.encode(part, add_special_tokens=first)
        return out

    def _continue(self, context: str, text: str) -> list[int]:
        """Return the tokens of `text` after `context`."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        anchors = [word for word in self._special if context.endswith(word)][:1] or ANCHORS
        for anchor in anchors:
            head = encode(anchor)
            tokens = encode(anchor + text)
            if head and tokens[: len(head)] == head:
                return tokens[len(head) :]
        return encode(text)


class Cut:
    """A tokenizer for one chat whose contents contain `mark`: encodes the text in pieces."""

    def __init__(self, tokenizer, escaper: PromptEscaper, mark: str):
        self._tokenizer, self._escaper, self._mark = tokenizer, escaper, mark

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._escaper.encode(pieces(text, self._mark), add_special_tokens)

    def apply_chat_template(self, chat: list[dict], tokenize: bool = True, **options):
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text


_REPLY = [(kind, end) for kind in ("think", "tool_call") for end in ("start", "end")]


def pieces(text: str, mark: str | None) -> list[str]:
    """Split a rendered text at its marks; JSON with needless escapes writes them as \\ue000."""
    if mark is None:
        return [text]
    return re.split(f"{mark}|{re.escape(json.dumps(mark)[1:-1])}", text)


def cut_front(parts: list[str], count: int) -> list[str]:
    """Drop the first `count` characters of a text in pieces."""
    at = 0
    while at < len(parts) - 1 and count >= len(parts[at]):
        count -= len(parts[at])
        at += 1
    return [parts[at][count:], *parts[at + 1 :]]


def _finder(words: set[str], folds: bool) -> re.Pattern | None:
    """Return a regex for the first characters of `words`: a mark after each also breaks overlapping words."""
    targets = sorted(word for word in words if len(word) > 1 and not word.isspace())
    if not targets:
        return None
    rests = "|".join(f"{re.escape(w[0])}(?={re.escape(w[1:])})" for w in targets)
    return re.compile(f"({rests})", re.IGNORECASE if folds else 0)


def _mapped(thing: Any, change, words: re.Pattern | None) -> Any:
    if isinstance(thing, str):
        return change(thing, words) if words is not None else thing
    if isinstance(thing, dict):
        pairs = [(_mapped(k, change, words), _mapped(v, change, words)) for k, v in thing.items()]
        return dict(pairs)
    if isinstance(thing, list | tuple):
        return [_mapped(item, change, words) for item in thing]
    return thing


def _with_arguments(message: dict) -> dict:
    """Return a message with the arguments of tool calls parsed: JSON may hide a word in escapes."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    return message | {"tool_calls": [_read_arguments(call) for call in message["tool_calls"]]}


def _read_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        values = untrusted.parse(arguments or "{}")
    except untrusted.Unsound:
        values = None
    if not isinstance(values, dict):  # an incomplete call, or plain text: keep it as it is
        values = {"arguments": arguments}
    return call | {"function": function | {"arguments": values}}


def with_texts(chat: list[dict]) -> list[dict]:
    """Return the messages with the arguments of tool calls as JSON text, which some templates require."""

    def written(call: dict) -> dict:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": text}}

    return [
        message | {"tool_calls": [written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in chat
    ]


# -- continue a reply that was cut off: its text is appended to the prompt


def continued(
    tokenizer: Any, escaper: PromptEscaper, prompt: tuple, parts: list[str], reply: dict
) -> tuple:
    """Return the prompt of a chat followed by the start of its reply, encoded as one text.

    tokenizer: mlx-lm's wrapper. prompt: (tokens, their segments, initial state of a reply) of the earlier messages.
    parts: its text, in pieces. reply: the last message: `content`, and `reasoning` (or `reasoning_content`) if the
    model reasons; without content the reasoning is continued. Raises ValueError if there is no text to continue.
    """
    tokens, segments, state = prompt
    text, state = _text(tokenizer, state, reply)
    if not text:
        raise ValueError("continue_final_message needs a reply with text to go on with")
    mark, (chat,) = escaper.marked([{"role": "assistant", "content": text}])
    first, *tail = pieces(chat[0]["content"], mark)
    # A chat template writes the first token itself.
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
    """Return the text of a partial reply with its marks, and the state in which it continues."""
    content = reply.get("content") or ""
    if not getattr(tokenizer, "has_thinking", False):
        return content, state
    reasoning = reply.get("reasoning") or reply.get("reasoning_content") or ""
    opened = state == "reasoning"  # some templates write the mark themselves
    text = reasoning if opened or not reasoning else tokenizer.think_start + reasoning
    if not content:
        return text, "reasoning"
    if opened or reasoning:
        text += tokenizer.think_end
    return text + content, "normal"
