"""Anthropic's messages API: requests and replies. Tools that run on Anthropic's servers are refused."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import Field, model_validator
from typing_extensions import Self

from mlxkv.generate.roles import joined
from mlxkv.serve.apis.body import (
    NOT_EMPTY,
    Body,
    Choice,
    Content,
    ContentPart,
    Format,
    Length,
    Object,
    StopWords,
    ToolName,
    Wrong,
    between,
    parts_of,
    text_of,
    tool,
    tool_call,
)
from mlxkv.serve.apis.reply import Blocks, event
from mlxkv.serve.refusals import Refused
from mlxkv.serve.request import ModelInfo, Request, Start

# Claude Code starts its system prompt with a billing line that differs per request: no prompt would hit the cache.
BILLING = "x-anthropic-billing-header:"


# -- requests


class MediaSource(Object):
    type: str = ""
    data: str = ""
    content: Content = Field(default_factory=list)


class DocumentBlock(ContentPart):
    """A content part, possibly a document with plain text."""

    title: str = ""
    source: MediaSource = Field(default_factory=MediaSource)

    def shown(self) -> str:
        if self.type == "document" and self.source.type in ("text", "content"):
            text = self.source.data if self.source.type == "text" else text_of(self.source.content)
            return "\n".join(filter(None, (self.title, text)))
        return super().shown()


class ContentBlock(DocumentBlock):
    """A content block. id, name, input: set for tool_use. tool_use_id, content, is_error: set for tool_result."""

    # Types other than text, by role, with their required fields.
    special: ClassVar[dict[str, dict[str, tuple[str, ...]]]] = {
        "user": {"tool_result": ("tool_use_id",)},
        "assistant": {"thinking": (), "redacted_thinking": (), "tool_use": ("id", "name")},
        "system": {},
    }
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Annotated[list[DocumentBlock], parts_of(DocumentBlock)] = Field(default_factory=list)
    is_error: bool = False

    def check_part(self) -> None:
        kinds = {kind: needed for role in self.special.values() for kind, needed in role.items()}
        if self.type not in kinds:
            super().check_part()
        for name in kinds.get(self.type, ()):
            if not getattr(self, name):
                raise Wrong(NOT_EMPTY, name, "")


class MessageParam(Object):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], parts_of(ContentBlock)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_its_blocks(self) -> Self:
        for i, block in enumerate(self.content):
            if block.type not in block.special[self.role]:
                try:
                    super(ContentBlock, block).check_part()
                except Wrong as wrong:
                    raise Wrong(str(wrong), f"content.{i}", wrong.got) from None
        return self

    def for_template(self) -> list[dict]:
        """Return the message in the chat template's form: each tool result is a separate message."""
        if self.role == "assistant":
            return [_assistant(self.content)]
        out = [
            _result(block) if block.type == "tool_result" else self._text(block.shown())
            for block in self.content
        ]
        return out or [self._text("")]

    def _text(self, text: str) -> dict:
        return {"role": self.role, "content": text}


def _assistant(blocks: list[ContentBlock]) -> dict:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            calls.append(tool_call(block.id, block.name, block.input))
        elif block.type != "redacted_thinking":  # encrypted: only Anthropic can read it
            texts.append(block.shown())
    out: dict = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        out["reasoning_content"] = "\n".join(thoughts)
    return out | ({"tool_calls": calls} if calls else {})


def _result(block: ContentBlock) -> dict:
    text = text_of(block.content, between="\n")
    text = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


class ToolParam(Object):
    type: str = ""
    name: ToolName = Field("", validate_default=True)
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _runs_here(self) -> Self:
        if "input_schema" not in self.model_fields_set:
            reason = (
                "runs on Anthropic's servers, and not here; leave it out, or give an input_schema"
            )
            raise Wrong(f"{self.type[:40]} {reason}")
        return self


class ToolChoice(Object):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""

    def choice(self) -> Choice:
        if self.type == "tool":
            return Choice("required", self.name)
        return Choice("required" if self.type == "any" else self.type)


class Schema(Object):
    type: Literal["json_schema"]
    schema_: Any = Field(default=None, alias="schema")


class OutputConfig(Object):
    format: Schema | None = None


class ThinkingConfig(Object):
    type: Literal["enabled", "adaptive", "disabled"] | None = None


class Messages(Body):
    messages: list[MessageParam] = Field(min_length=1)
    system: Content = Field(default_factory=list)
    max_tokens: Length | None = None
    top_k: Annotated[int, between(0, 1 << 20)] = 0
    stop_sequences: StopWords = Field(default_factory=list)
    tools: list[ToolParam] = Field(default_factory=list)
    tool_choice: ToolChoice = Field(default_factory=ToolChoice)
    thinking: ThinkingConfig = Field(default_factory=ThinkingConfig)
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: Schema | None = None  # an older name

    def form(self) -> Format | None:
        if schema := self.output_config.format:
            return Format("output_config.format.schema", schema.schema_)
        return self.output_format and Format("output_format.schema", self.output_format.schema_)


def read_messages(body: dict, model_info: ModelInfo) -> Request:
    """Parse a request body. Raises Refused."""
    asked = Messages.read(body)
    system = "\n".join(x.shown() for x in asked.system if not x.shown().startswith(BILLING))
    messages = [{"role": "system", "content": system}] if system else []
    messages += [one for message in asked.messages for one in message.for_template()]
    # A trailing assistant message is the start of the reply.
    others = any(message["role"] != "assistant" for message in messages)
    goes_on = others and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if asked.thinking.type:
        thinks = {"enable_thinking": asked.thinking.type != "disabled"}
        asked.chat_template_kwargs = thinks | asked.chat_template_kwargs
    return asked.request(
        model_info,
        asked.max_tokens,
        shorten=True,
        tools=[tool(one.name, one.description, one.input_schema) for one in asked.tools],
        choice=asked.tool_choice.choice(),
        form=asked.form(),
        chat=True,
        messages=joined(messages),
        stop=asked.stop_sequences,
        continue_final_message=goes_on,
    )


def models(names: tuple[str, ...], name: str) -> dict:
    """Return the response to /v1/models and /v1/models/{name} in Anthropic's format."""
    model = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
    if name:
        return model | {"id": name, "display_name": name}
    data = [model | {"id": each, "display_name": each} for each in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


# -- replies

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Error types by status, where they differ from OpenAI's.
KINDS = {413: "request_too_large", 500: "api_error"}


def speaks(path: str, headers: Collection[str]) -> bool:
    """Return whether the path or the header names identify an Anthropic client."""
    return path.startswith("/v1/messages") or "anthropic-version" in headers


def error_body(refused: Refused) -> dict:
    """Return the error body in Anthropic's format."""
    kind = KINDS.get(refused.status) or refused.body()["error"]["type"]
    kind = {"server_error": "api_error"}.get(kind, kind)
    error = {"type": kind, "message": refused.message}
    return {"type": "error", "error": error | refused.details}


class MessagesReply(Blocks):
    """A message, or its stream of events: message_start; content_block_start, _delta and _stop for each block;
    message_delta, message_stop."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._id = f"msg_{uuid4().hex}"

    def _send(self, kind: str, **fields) -> None:
        self.event({"type": kind, **fields}, kind)

    def begin(self, prompt: Start) -> None:
        super().begin(prompt)
        self._send("message_start", message=self._message([], None))
        self._send("ping")

    def wait(self, done: int, total: int) -> None:
        self._send("ping")

    def add_text(self, kind: str, text: str, begins: bool) -> None:
        if begins:
            self._begin(_block(kind, ""))
        self._delta(f"{kind}_delta", **{kind: text})

    def add_call(self, id: str, name: str, arguments: str) -> None:
        self._begin(_block("call", id, name, "{}"))
        self._delta("input_json_delta", partial_json=arguments)

    def _begin(self, block: dict) -> None:
        self._send("content_block_start", index=len(self.parts) - 1, content_block=block)

    def _delta(self, kind: str, **fields) -> None:
        self._send("content_block_delta", index=len(self.parts) - 1, delta={"type": kind, **fields})

    def end_part(self, kind: str, text: str, is_last: bool) -> None:
        if kind == "thinking":
            self._delta("signature_delta", **_signed(kind))
        self._send("content_block_stop", index=len(self.parts) - 1)

    def close(self, kv: dict, stop_word: str | None) -> None:
        super().close(kv, stop_word)
        why = {"stop_reason": self._why, "stop_sequence": self.stop_word}
        self._send("message_delta", delta=why, usage=self._usage(), kv=self.kv)
        self._send("message_stop")

    @property
    def _why(self) -> str:
        return "stop_sequence" if self.stop_word is not None else REASONS[self.reason]

    def _usage(self) -> dict:
        prompt, cached = self.prompt.prompt_tokens, self.prompt.cached_tokens
        return {
            "input_tokens": prompt - cached,  # Anthropic counts cached tokens separately
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

    def error_event(self, refused: Refused) -> bytes:
        return event(error_body(refused), "error")


def _signed(kind: str) -> dict:
    """Return the signature field of a thinking block: empty, as only Anthropic can sign."""
    return {"signature": ""} if kind == "thinking" else {}


def _tool_id(id: str) -> str:
    return id if id.startswith("toolu_") else f"toolu_{id.replace('-', '')}"


def _block(kind: str, *said: str) -> dict:
    if kind == "call":
        id, name, arguments = said
        call = {"id": _tool_id(id), "name": name, "input": json.loads(arguments)}
        return {"type": "tool_use"} | call
    return {"type": kind, kind: said[0]} | _signed(kind)
