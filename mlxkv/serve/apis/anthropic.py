"""Anthropic's messages API: requests are read into the one of OpenAI's that says the same.

Tools that run on Anthropic's servers are refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from uuid import uuid4

from mlxkv.serve.apis.reply import Blocks, event
from mlxkv.serve.http.fields import Fields, bad, call, mistyped, renamed, schema_format
from mlxkv.serve.http.request import ModelInfo, Request, check_request
from mlxkv.serve.refusals import Refused

SAME = (
    *("model", "stream", "max_tokens", "temperature", "top_p", "top_k"),
    *("chat_template_kwargs", "cache_salt"),
)
TAKEN = (
    *SAME,
    *("system", "messages", "tools", "tool_choice", "stop_sequences", "thinking"),
    *("output_config", "output_format"),
)
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "tools": "tools"}
# Claude Code begins its system prompt with a line for Anthropic's accounting, another one for each
# request: no prompt would ever be found in a cache.
BILLING = "x-anthropic-billing-header:"
CHOICES = {"auto": "auto", "none": "none", "any": "required"}  # in OpenAI's words


def read_messages(body: dict, model_info: ModelInfo) -> MessagesReply:
    """Return the request in a body. Raises Refused."""
    return MessagesReply(request_of(body, model_info), model_info.model)


def request_of(body: dict, model_info: ModelInfo) -> Request:
    """Return the request of a JSON object. Raises Refused, which names the field."""
    mistyped(body, TAKEN)
    fields, messages = Fields(body), _system(body)
    asked = fields.objects("messages")
    if not asked:
        raise fields.bad("messages", "must be a list that is not empty")
    for message in asked:
        messages += _message(message)
    plain = {name: body[name] for name in SAME if name in body}
    thinking = fields.object("thinking").get("type")
    if thinking is not None:
        if thinking not in ("enabled", "adaptive", "disabled"):
            raise bad("thinking.type", "choose from enabled, adaptive, disabled", thinking)
        extra = fields.object("chat_template_kwargs")
        plain["chat_template_kwargs"] = {"enable_thinking": thinking != "disabled"} | extra
    stops = fields.get("stop_sequences", list, [])
    if not all(isinstance(word, str) and word for word in stops):
        raise fields.bad("stop_sequences", "must be a list of strings, none empty")
    # What an assistant has begun to say, it goes on with.
    others = any(message["role"] != "assistant" for message in messages)
    more = others and messages[-1]["role"] == "assistant"
    translated = {
        "messages": messages,
        "tools": [_tool(each) for each in fields.objects("tools", optional=True)],
        "continue_final_message": more and not messages[-1].get("tool_calls"),
        "stop": stops,
        "response_format": _format(fields),
        "tool_choice": _choice(fields.object("tool_choice")),
    }
    try:
        return check_request(plain | translated, True, model_info, shorten=True)
    except Refused as refused:
        raise renamed(refused, NAMES) from None


def _choice(choice: dict) -> str | dict:
    """`tool_choice` in OpenAI's words."""
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise bad("tool_choice.type", "choose from auto, any, tool, none", kind)
    return CHOICES[kind]


def _format(fields: Fields) -> dict | None:
    """OpenAI's response_format for a schema, under its newer or its older name."""
    wanted = fields.object("output_config").get("format") or fields.body.get("output_format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise bad("output_config.format", "must be of type json_schema", wanted)
    return schema_format(wanted)


def _system(body: dict) -> list[dict]:
    system = body.get("system")
    if not isinstance(system, str):
        texts = Fields(body).texts("system")
        system = "\n".join(text for text in texts if not text.startswith(BILLING))
    return [{"role": "system", "content": system}] if system else []


def _message(message: Fields) -> list[dict]:
    role, content = message.body.get("role"), message.body.get("content")
    if role not in ("user", "assistant", "system"):
        raise message.bad("role", "unknown role; choose from user, assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = message.objects("content")
    if role == "assistant":
        return [_assistant(blocks)]
    out: list[dict] = []
    for block in blocks:
        if block.body.get("type") == "tool_result":
            out.append(_result(block))
        else:
            out.append({"role": role, "content": block.part()})
    return out or [{"role": role, "content": ""}]


def _assistant(blocks: list[Fields]) -> dict:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.body.get("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            calls.append(call(block.named("id"), block.named("name"), block.object("input")))
        elif kind != "redacted_thinking":  # nobody but Anthropic can read that
            texts.append(block.part())
    out: dict = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        out["reasoning_content"] = "\n".join(thoughts)
    return out | ({"tool_calls": calls} if calls else {})


def _result(block: Fields) -> dict:
    text = block.content("content", between="\n")
    if block.flag("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.named("tool_use_id"), "content": text}


def _tool(asked: Fields) -> dict:
    if "input_schema" not in asked.body:
        kind = str(asked.body.get("type"))[:40]
        reason = f"{kind} runs on Anthropic's servers, and not here; leave it out, or give an input_schema"
        raise bad(asked.path, reason)
    return asked.tool("input_schema")


def models(names: tuple[str, ...], name: str) -> dict:
    """Return what Anthropic's clients read at /v1/models, and behind it."""
    model = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
    if name:
        return model | {"id": name, "display_name": name}
    data = [model | {"id": each, "display_name": each} for each in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


# -- replies

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Kinds of errors by status, where they are not OpenAI's.
KINDS = {413: "request_too_large", 500: "api_error"}


def speaks(path: str, headers: Collection[str]) -> bool:
    """Return whether a client of this path, with these names of headers, is one of Anthropic's."""
    return path.startswith("/v1/messages") or "anthropic-version" in headers


def error_of(refused: Refused, path: str, headers: Collection[str]) -> dict:
    """Return the document that a client of this path, with these names of headers, expects."""
    return error_body(refused) if speaks(path, headers) else refused.body()


def error_body(refused: Refused) -> dict:
    """Return the document that Anthropic's clients expect."""
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

    def _send(self, kind: str, **fields) -> None:
        self.event({"type": kind, **fields}, kind)

    def start(self) -> None:
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

    def finish(self) -> None:
        why = {"stop_reason": self._why, "stop_sequence": self.stop_word}
        self._send("message_delta", delta=why, usage=self._usage(), kv=self.kv)
        self._send("message_stop")

    @property
    def _why(self) -> str:
        return "stop_sequence" if self.stop_word is not None else REASONS[self.reason]

    def _usage(self) -> dict:
        prompt, cached = self.prompt.prompt_tokens, self.prompt.cached_tokens
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

    def error_event(self, refused: Refused) -> bytes:
        return event(error_body(refused), "error")


def _signed(kind: str) -> dict:
    """Thinking has a signature by which Anthropic knows its own; ours has none."""
    return {"signature": ""} if kind == "thinking" else {}


def _tool_id(id: str) -> str:
    return id if id.startswith("toolu_") else f"toolu_{id.replace('-', '')}"


def _block(kind: str, *said: str) -> dict:
    if kind == "call":
        id, name, arguments = said
        call = {"id": _tool_id(id), "name": name, "input": json.loads(arguments)}
        return {"type": "tool_use"} | call
    return {"type": kind, kind: said[0]} | _signed(kind)
