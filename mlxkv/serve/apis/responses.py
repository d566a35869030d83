"""OpenAI's responses API, as far as coding agents use it: requests and replies.

Stateless: a client sends the whole conversation each time. Tools hosted by OpenAI are not offered to the model.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator
from typing_extensions import Self

from mlxkv.generate.roles import joined
from mlxkv.serve.apis.body import (
    NOT_EMPTY,
    Body,
    Choice,
    ContentPart,
    Format,
    Label,
    Length,
    Object,
    ToolName,
    Wrong,
    parts_of,
    text_of,
    tool,
    tool_call,
)
from mlxkv.serve.apis.reply import Blocks, event
from mlxkv.serve.grammar import ANY_OBJECT
from mlxkv.serve.refusals import Refused, bad
from mlxkv.serve.request import ModelInfo, Request, Start

RUN_HERE = ("function", "custom")  # types of tools
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


# -- requests


class ItemPart(ContentPart):
    texts: ClassVar = (
        *("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"),
    )


Parts = Annotated[list[ItemPart], parts_of(ItemPart)]


class Item(Object):
    """A message, reasoning, a tool call or its result."""

    needed: ClassVar = {
        "message": (),
        "reasoning": (),
        "function_call": ("call_id", "name"),
        "custom_tool_call": ("call_id", "name"),
        "function_call_output": ("call_id",),
        "custom_tool_call_output": ("call_id",),
    }
    type: str = "message"
    role: str = ""
    content: Parts = Field(default_factory=list)
    summary: Parts = Field(default_factory=list)
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""
    output: Parts = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        kind = value.get("type", "message") if isinstance(value, dict) else "message"
        if not isinstance(kind, str) or kind not in cls.needed:
            raise Wrong(f"items of type {str(kind)[:40]} are not read here")
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        for name in self.needed[self.type]:
            if not getattr(self, name):
                raise Wrong(NOT_EMPTY, name, "")
        if self.type == "message" and self.role not in ("user", "system", "developer", "assistant"):
            raise Wrong("unknown role; choose from user, assistant, developer", "role", self.role)
        return self


class ResponseTool(Object):
    type: str = ""
    name: ToolName = ""
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _drop_others(cls, value: Any) -> Any:
        """Keep only the type of a tool hosted by OpenAI: it is not offered to the model."""
        kind = value.get("type") if isinstance(value, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind not in RUN_HERE else value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if not self.type:
            raise Wrong("must be a text", "type", None)
        if self.runs_here and not self.name:
            raise Wrong(NOT_EMPTY, "name", "")
        return self

    @property
    def runs_here(self) -> bool:
        return self.type in RUN_HERE

    def for_template(self) -> dict:
        # A custom tool takes free text, but templates expect arguments.
        return tool(
            self.name, self.description, CUSTOM if self.type == "custom" else self.parameters
        )


def _choice(value: Any) -> Choice:
    match value:
        case "auto" | "none" | "required":
            return Choice(value)
        case {"type": "function" | "custom", "name": str(name)}:
            return Choice("required", name)
    raise ValueError('must be auto, none, required, or {"type": "function", ...}')


class TextFormat(Object):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Any = Field(default=None, alias="schema")


class TextOptions(Object):
    format: TextFormat = Field(default_factory=TextFormat)

    def form(self) -> Format | None:
        schemas = {"json_object": ANY_OBJECT, "json_schema": self.format.schema_}
        kind = self.format.type
        return None if kind == "text" else Format("text.format.schema", schemas[kind])


def _nothing_stored(value: Any) -> None:
    raise Wrong("nothing is stored here; send the whole conversation as input")


def _no_background(value: bool) -> bool:
    if value:
        raise Wrong("this server does not have it; leave it out")
    return value


Stored = Annotated[Any, BeforeValidator(_nothing_stored)]  # state kept at OpenAI


class Response(Body):
    previous_response_id: Stored = None
    conversation: Stored = None
    prompt: Stored = None
    background: Annotated[bool, AfterValidator(_no_background)] = False
    instructions: str = ""
    input: Annotated[
        list[Item],
        BeforeValidator(lambda x: [{"role": "user", "content": x}] if isinstance(x, str) else x),
    ]
    tools: list[ResponseTool] = Field(default_factory=list)
    tool_choice: Annotated[Choice, PlainValidator(_choice)] = Choice()
    max_output_tokens: Length | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    user: Label = ""


def read_response(body: dict, model_info: ModelInfo) -> Request:
    """Parse a request body. Raises Refused."""
    asked = Response.read(body)
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    messages += _messages(asked.input)
    if not messages:
        raise bad("input", "must be a list that is not empty", body["input"])
    tools = [one for one in asked.tools if one.runs_here]
    return asked.request(
        model_info,
        asked.max_output_tokens,
        shorten=True,
        tools=[one.for_template() for one in tools],
        choice=asked.tool_choice,
        form=asked.text.form(),
        chat=True,
        messages=joined(messages),
        user=asked.user,
        custom_tools=frozenset(one.name for one in tools if one.type == "custom"),
        echo={name: body[name] for name in ECHOED if body.get(name) is not None},
    )


def _messages(items: list[Item]) -> list[dict]:
    """Return messages in the chat template's form: reasoning and calls join the adjacent assistant message."""
    out: list[dict] = []

    def assistant() -> dict:
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        return out[-1]

    for item in items:
        if item.type == "message":
            role, text = item.role, text_of(item.content)
            if role == "assistant" and not (message := assistant())["content"]:
                message["content"] = text
            else:
                out.append({"role": "system" if role == "developer" else role, "content": text})
        elif item.type == "reasoning":
            if text := text_of(item.content or item.summary):
                assistant()["reasoning_content"] = text
        elif item.type.endswith("_output"):
            content = text_of(item.output)
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            is_custom = item.type == "custom_tool_call"
            arguments: object = {"input": item.input} if is_custom else item.arguments or "{}"
            calls = assistant().setdefault("tool_calls", [])
            calls.append(tool_call(item.call_id, item.name, arguments))
    return out


# -- replies

# Request fields echoed in the reply, with their defaults.
ECHOED = {"instructions": None, "max_output_tokens": None, "temperature": None, "top_p": None}
ECHOED |= {"tool_choice": "auto", "tools": [], "metadata": {}, "text": {"format": {"type": "text"}}}
# New items, and event names of their text, by part kind.
ITEMS = {
    "text": {"type": "message", "id": "msg_", "status": "in_progress", "role": "assistant"},
    "thinking": {"type": "reasoning", "id": "rs_", "summary": []},
}
TEXTS_OF = {"text": "output_text", "thinking": "reasoning_text"}


class ResponsesReply(Blocks):
    """A response, or its stream of events."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._number = 0
        self._items: list[dict] = []

    def _send(self, kind: str, **fields) -> None:
        self.event(self._numbered(kind, fields), kind)

    def _numbered(self, kind: str, fields: dict) -> dict:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def begin(self, prompt: Start) -> None:
        super().begin(prompt)
        self._send("response.created", response=self._response("in_progress"))
        self._send("response.in_progress", response=self._response("in_progress"))

    @property
    def _at(self) -> dict:
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
        if name in self.request.custom_tools and isinstance(given.get("input"), str):
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

    def close(self, kv: dict, stop_word: str | None) -> None:
        super().close(kv, stop_word)
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
            **(ECHOED | self.request.echo),
        }

    def error_event(self, refused: Refused) -> bytes:
        """Return two events: OpenAI's clients raise on the first, Codex reads the second."""
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
