"""Replies of OpenAI's responses API."""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import uuid4

from mlxkv.serve.apis.reply import Blocks, event
from mlxkv.serve.refusals import Refused

ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "tool_choice", "tools")


class ResponsesReply(Blocks):
    """A response, or its events. body: of the request. customs: names of its tools that take free text."""

    def __init__(self, asked, streams: bool, model: str, body: dict, customs: set[str]):
        super().__init__(asked, streams, model)
        self._id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._echo = {name: body.get(name) for name in ECHOED} | {
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "metadata": body.get("metadata") or {},
            "text": body.get("text") or {"format": {"type": "text"}},
        }
        self._customs, self._number = customs, 0
        self._items: list[dict] = []
        self._open = False

    def _send(self, kind: str, **fields) -> None:
        self.event(self._numbered(kind, fields), kind)

    def _numbered(self, kind: str, fields: dict) -> dict:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def start(self) -> None:
        self._send("response.created", response=self._response("in_progress"))
        self._send("response.in_progress", response=self._response("in_progress"))

    @property
    def _at(self) -> dict:
        """Return where an event belongs: the item that is written."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def text(self, kind: str, text: str, begins: bool) -> None:
        if begins:
            self._begin(_message() if kind == "text" else _reasoning())
            self._send(
                "response.content_part.added", **self._at, content_index=0, part=_part(kind, "")
            )
        name = "output_text" if kind == "text" else "reasoning_text"
        self._send(
            f"response.{name}.delta", **self._at, content_index=0, delta=text, **_logprobs(kind)
        )

    def call(self, id: str, name: str, arguments: str) -> None:
        id = id.replace("-", "")
        given: Any = json.loads(arguments)
        if name in self._customs and isinstance(given.get("input"), str):
            item = {"type": "custom_tool_call", "id": f"ctc_{id}", "name": name, "input": ""}
            kind, field, text = "custom_tool_call_input", "input", given["input"]
        else:
            item = {"type": "function_call", "id": f"fc_{id}", "name": name, "arguments": ""}
            kind, field, text = "function_call_arguments", "arguments", arguments
        self._begin(item | {"call_id": f"call_{id}", "status": "in_progress"})
        self._send(f"response.{kind}.delta", **self._at, delta=text)
        self._send(f"response.{kind}.done", **self._at, **{field: text})
        self._items[-1][field] = text

    def _begin(self, item: dict) -> None:
        self._close()
        self._items.append(item)
        self._open = True
        self._send("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: str = "completed") -> None:
        if not self._open:
            return
        item, self._open = self._items[-1], False
        kinds = {"message": "text", "reasoning": "thinking"}
        if kind := kinds.get(item["type"]):
            # The part before one that has just begun; the last one at the end.
            text = [said for what, said, *_ in self.parts if what == kind][-1]
            part = _part(kind, text)
            item["content"] = [part]
            name = "output_text" if kind == "text" else "reasoning_text"
            at = self._at | {"content_index": 0}
            self._send(f"response.{name}.done", **at, text=text, **_logprobs(kind))
            self._send("response.content_part.done", **at, part=part)
        if "status" in item:
            item["status"] = status
        self._send("response.output_item.done", output_index=len(self._items) - 1, item=item)

    @property
    def _status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

    def finish(self) -> None:
        self._close(self._status)
        self._send(f"response.{self._status}", response=self.document())

    def document(self) -> dict:
        prompt, reply = self.started.prompt, self.count
        return self._response(self._status) | {
            "kv": self.kv,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": self.started.cached},
                "output_tokens": reply,
                "total_tokens": prompt + reply,
            },
        }

    def _response(self, status: str) -> dict:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self.model,
            "output": list(self._items),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._echo,
        }

    def failed(self, refused: Refused) -> bytes:
        """OpenAI's own clients raise at the first, Codex reads the second."""
        error = {"code": refused.code or "server_error", "message": refused.message}
        response = self._response("failed") | {"error": error}
        first = {"error": refused.body()["error"], **error, "param": None}
        events = {"error": first, "response.failed": {"response": response}}
        return b"".join(event(self._numbered(kind, one), kind) for kind, one in events.items())


def _message() -> dict:
    return {
        "type": "message",
        "id": f"msg_{uuid4().hex}",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _reasoning() -> dict:
    return {"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": [], "content": []}


def _part(kind: str, text: str) -> dict:
    if kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _logprobs(kind: str) -> dict:
    return {"logprobs": []} if kind == "text" else {}
