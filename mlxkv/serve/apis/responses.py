"""Requests of OpenAI's responses API, as far as coding agents use it.

Nothing is stored: a client sends the whole conversation each time. Tools that run at OpenAI are not
offered to the model.
"""

from __future__ import annotations

import json

from mlxkv.serve.apis.checks import field, joined, mistyped, named, objects, tool, unsupported
from mlxkv.serve.apis.responses_reply import ResponsesReply
from mlxkv.serve.http.request import Request, Served, bad, check, document

SAME = ("model", "temperature", "top_p", "user", "chat_template_kwargs", "cache_salt")
TAKEN = (
    *(
        *SAME,
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "stream",
        "max_output_tokens",
        "text",
    ),
    *("previous_response_id", "conversation", "background", "prompt"),
)
KNOWN = frozenset(
    {
        *("client_metadata", "context_management", "include", "max_tool_calls", "metadata"),
        *("moderation", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "store"),
        *("stream_options", "top_logprobs", "truncation"),
    }
)
# What OpenAI's servers keep or do, by the field that asks for it.
KEPT = ("previous_response_id", "conversation", "prompt")
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def read(raw: bytes, served: Served) -> ResponsesReply:
    """The request in a body. Raises Refused."""
    body = document(raw)
    request, customs = request_of(body, served)
    streams = field("", body, "stream", bool, False)
    return ResponsesReply(request, streams, served.model, body, customs)


def request_of(body: dict, served: Served) -> tuple[Request, set[str]]:
    """The request of a JSON object, and the names of its custom tools. Raises Refused."""
    mistyped(body, TAKEN, KNOWN)
    for name in KEPT:
        if body.get(name) is not None:
            raise unsupported(name, "nothing is stored here; send the whole conversation as input")
    if field("", body, "background", bool, False):
        raise unsupported("background", "this server does not have it; leave it out")
    messages = []
    if instructions := field("", body, "instructions", str, ""):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += _messages(objects("input", given))
    tools, customs = _tools(objects("tools", body.get("tools") or []))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    plain = {name: body[name] for name in SAME if name in body}
    found = {
        "messages": joined(messages),
        "tools": tools,
        "tool_choice": choice,
        "response_format": _format(field("", body, "text", dict, {}).get("format")),
    }
    if body.get("max_output_tokens") is not None:
        found["max_tokens"] = body["max_output_tokens"]
    return check(plain | found, True, served, shorten=True), customs


def _format(wanted: object) -> dict | None:
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    return wanted  # checked where chats check theirs


def _tools(tools: list[tuple[str, dict]]) -> tuple[list[dict], set[str]]:
    out, customs = [], set()
    for where, one in tools:
        kind = one.get("type")
        if kind in ("function", "custom"):
            name, about = named(where, one, "name"), field(where, one, "description", str, "")
            schema = field(where, one, "parameters", dict, {})
            if kind == "custom":  # free text, where a template has arguments
                customs.add(name)
                schema = CUSTOM
            out.append(tool(where, name, about, schema))
        elif not isinstance(kind, str):
            raise bad(f"{where}.type", "must be a text", kind)
    return out, customs


def _messages(items: list[tuple[str, dict]]) -> list[dict]:
    """Chat messages of items: thinking and calls belong to the assistant's message around them."""
    out: list[dict] = []

    def assistant() -> dict:
        if not out or out[-1]["role"] != "assistant":
            out.append({"role": "assistant", "content": ""})
        return out[-1]

    for where, item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role, text = item.get("role"), _text(where, item.get("content"))
            if role == "assistant" and not (message := assistant())["content"]:
                message["content"] = text
            elif role in ("user", "system", "developer", "assistant"):
                out.append({"role": "system" if role == "developer" else role, "content": text})
            else:
                raise bad(
                    f"{where}.role", "unknown role; choose from user, assistant, developer", role
                )
        elif kind == "reasoning":
            if text := _text(where, item.get("content") or item.get("summary") or []):
                assistant()["reasoning_content"] = text
        elif kind in ("function_call", "custom_tool_call"):
            assistant().setdefault("tool_calls", []).append(_call(where, item, kind))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _text(where, item.get("output"))
            id = named(where, item, "call_id")
            out.append({"role": "tool", "tool_call_id": id, "content": content})
        else:
            raise unsupported(where, f"items of type {str(kind)[:40]} are not read here")
    return out


def _call(where: str, item: dict, kind: str) -> dict:
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": field(where, item, "input", str, "")})
    else:
        arguments = field(where, item, "arguments", str, "{}")
    function = {"name": named(where, item, "name"), "arguments": arguments}
    return {"id": named(where, item, "call_id"), "type": "function", "function": function}


def _text(where: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for place, part in objects(f"{where}.content", content):
        if part.get("type") not in TEXTS:
            raise unsupported(place, f"only text is read here; got {str(part.get('type'))[:40]}")
        texts.append(
            field(place, part, "refusal" if part["type"] == "refusal" else "text", str, "")
        )
    return "".join(texts)
