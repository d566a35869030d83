"""OpenAI's responses API, as far as coding agents use it.

Nothing is stored: a client sends the whole conversation each time. Tools that run at OpenAI are not
offered to the model.
"""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import uuid4

from mlxkv.serve.apis.reply import Blocks, event
from mlxkv.serve.http.fields import Fields, bad, call, mistyped, renamed, schema_format
from mlxkv.serve.http.request import ModelInfo, Request, check_request
from mlxkv.serve.refusals import Refused

SAME = ("model", "stream", "temperature", "top_p", "user", "chat_template_kwargs", "cache_salt")
TAKEN = (
    *SAME,
    *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "text"),
    *("previous_response_id", "conversation", "background", "prompt"),
)
# What OpenAI's servers keep or do, by the field that asks for it.
KEPT = ("previous_response_id", "conversation", "prompt")
NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
    "tools": "tools",
}
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def read_response(body: dict, model_info: ModelInfo) -> ResponsesReply:
    """Return the request in a body. Raises Refused."""
    request, customs = request_of(body, model_info)
    return ResponsesReply(request, model_info.model, body, customs)


def request_of(body: dict, model_info: ModelInfo) -> tuple[Request, set[str]]:
    """Return the request of a JSON object, and the names of its custom tools. Raises Refused."""
    mistyped(body, TAKEN)
    fields = Fields(body)
    for name in KEPT:
        if body.get(name) is not None:
            raise bad(name, "nothing is stored here; send the whole conversation as input")
    if fields.flag("background"):
        raise bad("background", "this server does not have it; leave it out")
    messages = []
    if instructions := fields.text("instructions"):
        messages.append({"role": "system", "content": instructions})
    if isinstance(body.get("input"), str):
        messages.append({"role": "user", "content": body["input"]})
    else:
        messages += _messages(fields.objects("input"))
    tools, customs = _tools(fields.objects("tools", optional=True))
    choice, form = body.get("tool_choice"), fields.object("text").get("format")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = schema_format(form)
    plain = {name: body[name] for name in SAME if name in body}
    plain |= {"messages": messages, "tools": tools}
    plain |= {"tool_choice": choice, "response_format": form}  # checked where chats check theirs
    if body.get("max_output_tokens") is not None:
        plain["max_tokens"] = body["max_output_tokens"]
    try:
        return check_request(plain, True, model_info, shorten=True), customs
    except Refused as refused:
        raise renamed(refused, NAMES) from None


def _tools(tools: list[Fields]) -> tuple[list[dict], set[str]]:
    out, customs = [], set()
    for tool in tools:
        kind = tool.body.get("type")
        if kind in ("function", "custom"):
            out.append(tool.tool("parameters"))
            if kind == "custom":  # free text, where a template has arguments
                customs.add(tool.body["name"])
                out[-1]["function"]["parameters"] = CUSTOM
        elif not isinstance(kind, str):
            raise tool.bad("type", "must be a text")
    return out, customs


def _messages(items: list[Fields]) -> list[dict]:
    """Chat messages of items: thinking and calls belong to the assistant's message around them."""
    out: list[dict] = []

    def assistant() -> dict:
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        return out[-1]

    for item in items:
        kind = item.body.get("type", "message")
        if kind == "message":
            role, text = item.body.get("role"), item.content("content", TEXTS)
            if role == "assistant" and not (message := assistant())["content"]:
                message["content"] = text
            elif role in ("user", "system", "developer", "assistant"):
                out.append({"role": "system" if role == "developer" else role, "content": text})
            else:
                raise item.bad("role", "unknown role; choose from user, assistant, developer")
        elif kind == "reasoning":
            name = "content" if item.body.get("content") else "summary"
            if text := item.content(name, TEXTS):
                assistant()["reasoning_content"] = text
        elif kind in ("function_call", "custom_tool_call"):
            is_custom = kind == "custom_tool_call"
            arguments: object = item.text("arguments") or "{}"
            arguments = {"input": item.text("input")} if is_custom else arguments
            calls = assistant().setdefault("tool_calls", [])
            calls.append(call(item.named("call_id"), item.named("name"), arguments))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = item.content("output", TEXTS)
            out.append({"role": "tool", "tool_call_id": item.named("call_id"), "content": content})
        else:
            raise bad(item.path, f"items of type {str(kind)[:40]} are not read here")
    return out


# -- replies

ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "tool_choice", "tools")
# New items, and names of texts, by the kind of a part.
ITEMS = {
    "text": {"type": "message", "id": "msg_", "status": "in_progress", "role": "assistant"},
    "thinking": {"type": "reasoning", "id": "rs_", "summary": []},
}
TEXTS_OF = {"text": "output_text", "thinking": "reasoning_text"}


class ResponsesReply(Blocks):
    """A response, or its events. body: of the request. customs: names of its tools that take free text."""

    def __init__(self, request: Request, model: str, body: dict, customs: set[str]):
        super().__init__(request, model)
        self._id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._echo = {name: body.get(name) for name in ECHOED} | {
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "metadata": body.get("metadata") or {},
            "text": body.get("text") or {"format": {"type": "text"}},
        }
        self._customs, self._number = customs, 0
        self._items: list[dict] = []

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

    def add_text(self, kind: str, text: str, begins: bool) -> None:
        if begins:
            self._begin(ITEMS[kind] | {"id": ITEMS[kind]["id"] + uuid4().hex, "content": []})
            part = _part(kind, "")
            self._send("response.content_part.added", **self._at, content_index=0, part=part)
        name, more = f"response.{TEXTS_OF[kind]}.delta", _logprobs(kind)
        self._send(name, **self._at, content_index=0, delta=text, **more)

    def add_call(self, id: str, name: str, arguments: str) -> None:
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
        self._items.append(item)
        self._send("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def end_part(self, kind: str, text: str, is_last: bool) -> None:
        item = self._items[-1]
        if kind != "call":
            part, at = _part(kind, text), self._at | {"content_index": 0}
            item["content"] = [part]
            self._send(f"response.{TEXTS_OF[kind]}.done", **at, text=text, **_logprobs(kind))
            self._send("response.content_part.done", **at, part=part)
        if "status" in item:
            item["status"] = self._status if is_last else "completed"
        self._send("response.output_item.done", output_index=len(self._items) - 1, item=item)

    @property
    def _status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

    def finish(self) -> None:
        self._send(f"response.{self._status}", response=self.document())

    def document(self) -> dict:
        prompt, reply = self.prompt.prompt_tokens, self.count
        return self._response(self._status) | {
            "kv": self.kv,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": self.prompt.cached_tokens},
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

    def error_event(self, refused: Refused) -> bytes:
        """OpenAI's own clients raise at the first, Codex reads the second."""
        error = {"code": refused.code or "server_error", "message": refused.message}
        response = self._response("failed") | {"error": error}
        first = {"error": refused.body()["error"], **error, "param": None}
        events = {"error": first, "response.failed": {"response": response}}
        return b"".join(event(self._numbered(kind, one), kind) for kind, one in events.items())


def _part(kind: str, text: str) -> dict:
    more = {"annotations": [], "logprobs": []} if kind == "text" else {}
    return {"type": TEXTS_OF[kind], "text": text} | more


def _logprobs(kind: str) -> dict:
    return {"logprobs": []} if kind == "text" else {}
