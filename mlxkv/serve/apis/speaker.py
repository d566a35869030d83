"""A reply in the words of an API, made from the events that mlx-lm writes for OpenAI's chat."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlxkv.serve.http.caller import Caller
from mlxkv.serve.http.completion import Completion
from mlxkv.serve.http.request import Request
from mlxkv.serve.refusals import Refused


@dataclass(frozen=True)
class Counts:
    """Tokens of a request: of its prompt, of these found in a cache, of its reply."""

    prompt: int
    cached: int
    reply: int = 0


class Speaker(ABC):
    """Writes the reply to one request.

    asked: the request. streams: whether parts are written as they come; else `document` is the reply.
    model: its name in replies. write: takes bytes of a stream, set before the reply begins.
    parts: of the whole reply so far: ["text" or "thinking", text], or ["call", id, name, arguments as JSON text].
    """

    def __init__(self, asked: Request, streams: bool, model: str):
        # Counts come with the last event of a stream, so mlx-lm always streams.
        self.asked = replace(asked, stream=True, include_usage=True)
        self.streams, self.model = streams, model
        self.write: Callable[[bytes], None] = lambda data: None
        self.counts = Counts(0, 0)
        self.parts: list[list[str]] = []
        self.kv: dict | None = None
        self.reason, self.stop_word = "stop", None
        self._held = ""

    # -- what mlx-lm says

    def read(self, document: dict) -> None:
        """One event of OpenAI's stream."""
        self.kv = document.get("kv", self.kv)
        for choice in document["choices"]:
            said = choice["delta"]
            self._say("thinking", said.get("reasoning") or "")
            self._say("text", said.get("content") or "")
            for call in said.get("tool_calls") or ():
                self._held = ""
                name, arguments = (call["function"][key] for key in ("name", "arguments"))
                self.parts.append(["call", call["id"], name, arguments])
                self.call(call["id"], name, arguments)
            self.reason = choice["finish_reason"] or self.reason
        if usage := document.get("usage"):
            self.counts = replace(self.counts, reply=usage["completion_tokens"])

    def close(self) -> None:
        """Nothing more comes: a reply of blanks alone is one."""
        if self._held and not self.parts:
            self._say("text", "", blank=True)
        self.end()

    def _say(self, kind: str, text: str, blank: bool = False) -> None:
        begins = not self.parts or self.parts[-1][0] != kind
        if begins:  # blank lines between thoughts, text and calls are no part of their own
            text, self._held = self._held + text, ""
            if not text.strip() and not blank:
                self._held = text
                return
            self.parts.append([kind, ""])
        if text:
            self.parts[-1][1] += text
            self.said(kind, text, begins)

    # -- what the API says; nothing is written where `streams` is False

    @abstractmethod
    def start(self) -> None:
        """The model reads the prompt; `counts` has its tokens."""

    def wait(self) -> None:  # noqa: B027 - an API may have nothing to say here
        """The client is to know that the prompt is still read."""

    @abstractmethod
    def said(self, kind: str, text: str, begins: bool) -> None:
        """Text or thinking. begins: whether a part of another kind, or nothing, came before it."""

    @abstractmethod
    def call(self, id: str, name: str, arguments: str) -> None:
        """A call of a tool."""

    @abstractmethod
    def end(self) -> None:
        """The reply is complete: `reason` is "stop", "length" or "tool_calls", `stop_word` the one that ended it."""

    @abstractmethod
    def document(self) -> dict:
        """The whole reply."""

    @abstractmethod
    def failed(self, refused: Refused) -> bytes:
        """An error behind the start of a stream."""


def event(document: dict, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document)}\n\n".encode()


class Dictation(Completion):
    """mlx-lm's handler without a connection: it tells a speaker what it writes."""

    def __init__(self, speaker: Speaker, fingerprint: str, created: int):
        self.speaker, self.wfile = speaker, self
        self.system_fingerprint, self.created = fingerprint, created

    def take(self, caller: Caller) -> None:
        """Have the reply written. Raises what `complete` raises."""
        speaker = self.speaker
        self.complete(speaker.asked, caller, speaker.model)
        speaker.counts = replace(speaker.counts, cached=caller.cached_tokens)
        if speaker.reason == "stop":
            speaker.stop_word = caller.stop_word
        speaker.close()

    # -- what mlx-lm's handler calls

    def send_response(self, code, message=None):
        pass

    def send_header(self, keyword, value):
        pass

    def _set_cors_headers(self):
        pass

    def end_headers(self):
        caller = self.response_generator
        self.speaker.counts = Counts(len(caller.context.prompt), caller.cached_tokens)
        self.speaker.start()

    def write(self, data: bytes) -> None:
        for one in data.decode().split("\n\n"):
            if one.startswith(":"):
                self.speaker.wait()
            elif one.startswith("data: {"):
                self.speaker.read(json.loads(one.removeprefix("data: ")))

    def flush(self) -> None:
        pass
