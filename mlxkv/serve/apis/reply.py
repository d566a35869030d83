"""Replies: split the model's output into thinking, text and tool calls, and format them for an API."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from typing import Any

from mlx_lm.generate import TextStateMachine

from mlxkv.serve.apis import calls
from mlxkv.serve.refusals import Refused
from mlxkv.serve.request import Request, Start, Token

KINDS = {"normal": "text", "reasoning": "thinking"}  # by mlx-lm's state names


class Markup:
    """Strips thinking and tool-call marks from a streamed text.

    machine: mlx-lm's state machine, which knows the marks. state: initial state. parse: mlx-lm's tool-call parser, or
    None. tools: the request's tools. marks: opening and closing marks of calls.
    """

    def __init__(
        self,
        machine: TextStateMachine,
        state: str,
        parse: Any,
        tools: list | None,
        marks: tuple[str, str],
    ):
        self._state, self._parse, self._tools = machine.make_state(state), parse, tools
        self._marks = marks
        self._call: str | None = "" if state == "tool" else None

    def feed(self, text: str, last: bool = False) -> list[tuple]:
        """Return parts: ("text" or "thinking", text) and ("call", id, name, arguments as JSON text). A call that
        cannot be parsed stays text, unchanged."""
        self._state, segments = TextStateMachine.split(self._state, text)
        if last:
            self._state, tail, state = TextStateMachine.flush(self._state)
            segments.append((state, tail))
        parts: list[tuple] = []
        for state, text in segments:
            if state == "tool":
                self._call = (self._call or "") + text
                continue
            parts += self._close(True)
            if text and state in KINDS:
                parts.append((KINDS[state], text))
        return parts + (self._close(False) if last else [])

    def _close(self, is_closed: bool) -> list[tuple]:
        text, self._call = self._call, None
        if text is None:
            return []
        try:
            return calls.parts_of(self._parse, text, self._tools, is_closed)
        except Exception as error:  # parsers raise anything
            logging.warning(f"a tool call could not be read, it is text: {str(error)[:80]!r}")
        start, end = self._marks
        return [("text", start + text + (end if is_closed else ""))]


class Reply(ABC):
    """The reply to one request, in the format of an API.

    streams: whether parts are sent as they are generated; else `document()` is the reply. model: its name in replies.
    markup: parses the model's output.
    prompt: `Start` of the request; set once the reply `has_begun`. count: tokens of the reply. kv: content of the
    `kv` field. reason: "stop", "length" or "tool_calls". stop_word: the one that ended the reply, or None.

    The server calls `begin`, `wait`, `take` and `close`, and sends the bytes returned by `flush`.
    """

    prompt: Start

    def __init__(self, request: Request, model: str, markup: Markup):
        self.request, self.streams, self.model = request, request.stream, model
        self._markup = markup
        self.count, self.has_begun = 0, False
        self.kv: dict | None = None
        self.reason, self.stop_word = "stop", None
        self._has_calls, self._buffer = False, b""

    def begin(self, prompt: Start) -> None:
        """Record that the prefill has started."""
        self.prompt, self.has_begun = prompt, True
        self.start()

    def wait(self, done: int, total: int) -> None:
        """Report prefill progress: `done` of `total` prompt tokens."""
        self._buffer += b": keepalive %d/%d\n\n" % (done, total)

    def take(self, token: Token) -> None:
        """Add a generated token."""
        self.count += 1
        parts = self._markup.feed(token.text, token.reason is not None)
        self._has_calls = self._has_calls or any(part[0] == "call" for part in parts)
        if token.reason is not None:
            ends_with_calls = token.reason == "stop" and self._has_calls
            self.reason = "tool_calls" if ends_with_calls else token.reason
        self.add_parts(parts, token)

    def close(self, kv: dict, stop_word: str | None) -> None:
        """Mark the reply as complete."""
        self.kv, self.stop_word = kv, stop_word if self.reason == "stop" else None
        self.end()

    def start(self) -> None:  # noqa: B027 some APIs send no start
        """Begin the reply."""

    @abstractmethod
    def add_parts(self, parts: list[tuple], token: Token) -> None:
        """Add the parts of the text that `token` completes."""

    @abstractmethod
    def end(self) -> None:
        """End the reply, after its last part."""

    @abstractmethod
    def document(self) -> dict:
        """Return the whole reply."""

    @abstractmethod
    def error_event(self, refused: Refused) -> bytes:
        """Return the error event for a stream that has started."""

    def event(self, document: dict, name: str = "") -> None:
        """Send a server-sent event."""
        if self.streams:
            self._buffer += event(document, name)

    def flush(self) -> bytes:
        """Return the pending bytes of the stream."""
        out, self._buffer = self._buffer, b""
        return out


class Blocks(Reply):
    """A reply in blocks of text, thinking and tool calls. Blank lines between blocks are dropped.

    parts: the reply so far: ["text" or "thinking", text], or ["call", id, name, arguments as JSON text].
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.parts: list[list[str]] = []
        self._blank = ""

    @abstractmethod
    def add_text(self, kind: str, text: str, begins: bool) -> None:
        """Add text. begins: whether it starts a new part instead of extending the last one."""

    @abstractmethod
    def add_call(self, id: str, name: str, arguments: str) -> None:
        """Add a tool call."""

    @abstractmethod
    def end_part(self, kind: str, text: str, is_last: bool) -> None:
        """End a part. text: its text, or the id of a call."""

    @abstractmethod
    def finish(self) -> None:
        """End the reply, after `end_part` for the last part."""

    def add_parts(self, parts: list[tuple], token: Token) -> None:
        for kind, *values in parts:
            if kind == "call":
                self._blank = ""
                self._begin_part(kind, *values)
                self.add_call(*values)
            else:
                self._extend(kind, *values)

    def _extend(self, kind: str, text: str, blank: bool = False) -> None:
        begins = not self.parts or self.parts[-1][0] != kind
        if begins:
            text, self._blank = self._blank + text, ""
            if not text.strip() and not blank:
                self._blank = text
                return
            self._begin_part(kind, "")
        if text:
            self.parts[-1][1] += text
            self.add_text(kind, text, begins)

    def end(self) -> None:
        if self._blank and not self.parts:  # keep a reply of blanks alone
            self._extend("text", "", blank=True)
        self._end_part(is_last=True)
        self.finish()

    def _begin_part(self, *part: str) -> None:
        self._end_part()
        self.parts.append([*part])

    def _end_part(self, is_last: bool = False) -> None:
        if self.parts:
            kind, text, *_ = self.parts[-1]
            self.end_part(kind, text, is_last)


def event(document: dict, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document)}\n\n".encode()
