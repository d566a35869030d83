"""Replies of Anthropic's messages API."""

from __future__ import annotations

import json
from uuid import uuid4

from mlxkv.serve.apis.reply import Blocks, event
from mlxkv.serve.refusals import Refused

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Kinds of errors by status, where they are not OpenAI's.
KINDS = {413: "request_too_large", 500: "api_error"}


def error_body(refused: Refused) -> dict:
    """The document that Anthropic's clients expect."""
    kind = KINDS.get(refused.status) or refused.body()["error"]["type"]
    kind = {"server_error": "api_error"}.get(kind, kind)
    error = {"type": kind, "message": refused.message}
    return {"type": "error", "error": error | refused.details}


class MessagesReply(Blocks):
    """A message, or its events: message_start, for each block content_block_start, _delta and _stop,
    message_delta, message_stop."""

    def __init__(self, *args):
        super().__init__(*args)
        self._id = f"msg_{uuid4().hex}"
        self._blocks, self._open = 0, ""

    def _send(self, kind: str, **fields) -> None:
        self.event({"type": kind, **fields}, kind)

    def start(self) -> None:
        self._send("message_start", message=self._message([], None))
        self._send("ping")

    def wait(self, done: int, total: int) -> bytes:
        return event({"type": "ping"}, "ping")

    def text(self, kind: str, text: str, begins: bool) -> None:
        if begins:
            self._begin(kind, {"type": kind, kind: ""} | _signed(kind))
        self._delta(f"{kind}_delta", **{kind: text})

    def call(self, id: str, name: str, arguments: str) -> None:
        self._begin("call", {"type": "tool_use", "id": _tool_id(id), "name": name, "input": {}})
        self._delta("input_json_delta", partial_json=arguments)

    def _begin(self, kind: str, block: dict) -> None:
        self._close()
        self._open = kind
        self._send("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, kind: str, **fields) -> None:
        self._send("content_block_delta", index=self._blocks, delta={"type": kind, **fields})

    def _close(self) -> None:
        if self._open == "thinking":
            self._delta("signature_delta", **_signed("thinking"))
        if self._open:
            self._send("content_block_stop", index=self._blocks)
            self._blocks += 1
        self._open = ""

    def finish(self) -> None:
        self._close()
        why = {"stop_reason": self._why, "stop_sequence": self.stop_word}
        self._send("message_delta", delta=why, usage=self._usage(), kv=self.kv)
        self._send("message_stop")

    @property
    def _why(self) -> str:
        return "stop_sequence" if self.stop_word is not None else REASONS[self.reason]

    def _usage(self) -> dict:
        prompt, cached = self.started.prompt, self.started.cached
        return {
            "input_tokens": prompt - cached,  # Anthropic counts the others apart
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.count,
        }

    def _message(self, content: list[dict], why: str | None) -> dict:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": why,
            "stop_sequence": self.stop_word,
            "usage": self._usage(),
        }

    def document(self) -> dict:
        return self._message([_block(*part) for part in self.parts], self._why) | {"kv": self.kv}

    def failed(self, refused: Refused) -> bytes:
        return event(error_body(refused), "error")


def _signed(kind: str) -> dict:
    """Thinking has a signature by which Anthropic knows its own; ours has none."""
    return {"signature": ""} if kind == "thinking" else {}


def _tool_id(id: str) -> str:
    return id if id.startswith("toolu_") else f"toolu_{id.replace('-', '')}"


def _block(kind: str, *said: str) -> dict:
    if kind == "call":
        id, name, arguments = said
        return {
            "type": "tool_use",
            "id": _tool_id(id),
            "name": name,
            "input": json.loads(arguments),
        }
    return {"type": kind, kind: said[0]} | _signed(kind)
