"""Ollama's API: /api/chat, and what its clients read before they ask."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from hashlib import sha256

from mlxkv.serve.apis.checks import field, mistyped, objects, tool
from mlxkv.serve.apis.speaker import Speaker
from mlxkv.serve.http.request import Request, Served, bad, check, document
from mlxkv.serve.refusals import Refused

VERSION = "0.9.0"  # of Ollama, whose /api/chat this is: the first with `thinking`
TAKEN = ("model", "messages", "tools", "stream", "format", "options", "think", "keep_alive")
# Options of models, by the names that they have here. Others set up llama.cpp, and change nothing.
OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
}


def error_body(refused: Refused) -> dict:
    """The document that Ollama's clients expect."""
    return {"error": refused.message}


def read(raw: bytes, served: Served) -> OllamaReply:
    """The request in a body. Raises Refused."""
    body = document(raw)
    return OllamaReply(
        request_of(body, served), field("", body, "stream", bool, True), served.model
    )


def request_of(body: dict, served: Served) -> Request:
    """The request of a JSON object. Raises Refused, which names the field."""
    mistyped(body, TAKEN, frozenset())
    options = field("", body, "options", dict, {})
    plain = {name: options[own] for own, name in OPTIONS.items() if options.get(own) is not None}
    if plain.get("repetition_penalty") == 1:
        del plain["repetition_penalty"]  # Ollama's number for none
    longest = options.get("num_predict")
    if longest is not None and (type(longest) is not int or longest == 0):
        raise bad("options.num_predict", "must be an integer, not 0", longest)
    if longest is not None:
        plain["max_tokens"] = longest if longest > 0 else served.longest
    if isinstance(seed := plain.get("seed"), int) and seed < 0:  # any, to Ollama
        del plain["seed"]
    think = body.get("think")
    if isinstance(think, bool):
        plain["chat_template_kwargs"] = {"enable_thinking": think}
    elif think is not None and think not in ("low", "medium", "high"):
        raise bad("think", "must be true, false, low, medium or high", think)
    found = {
        "model": model_of(body, served.model),
        "messages": [_message(*one) for one in objects("messages", body.get("messages"))],
        "tools": [_tool(*one) for one in objects("tools", body.get("tools") or [])],
        "response_format": _format(body.get("format")),
    }
    return check(plain | found, True, served, shorten=True)


def model_of(body: dict, name: str) -> str:
    """The model that a client names, without Ollama's tag for the newest."""
    return field("", body, "model", str, name).removesuffix(":latest")


def _format(wanted: object) -> dict | None:
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"type": "json_object"}
    if not isinstance(wanted, dict):
        raise bad("format", "must be json, or a JSON schema", wanted)
    return {"type": "json_schema", "json_schema": {"schema": wanted}}


def _message(where: str, message: dict) -> dict:
    if message.get("images"):
        raise bad(f"{where}.images", "this server reads no images; leave it out", "...")
    out = {"role": message.get("role"), "content": field(where, message, "content", str, "")}
    if thinking := field(where, message, "thinking", str, ""):
        out["reasoning_content"] = thinking
    if name := message.get("tool_name"):
        out["name"] = name
    if calls := message.get("tool_calls"):
        out["tool_calls"] = calls
    return out


def _tool(where: str, one: dict) -> dict:
    function = field(where, one, "function", dict, {})
    name = field(f"{where}.function", function, "name", str, "")
    if not name:
        raise bad(f"{where}.function.name", "must be a text that is not empty", name)
    schema = field(where, function, "parameters", dict, {})
    return tool(where, name, field(where, function, "description", str, ""), schema)


class OllamaReply(Speaker):
    """A reply as JSON documents, a line each: parts of the message, and the counts at the end."""

    kind = "application/x-ndjson"

    def __init__(self, *args):
        super().__init__(*args)
        self._began = self._started = self._first = time.monotonic()

    def _send(self, message: dict) -> None:
        if self.streams:
            line = self._line({"content": "", **message}) | {"done": False}
            self.write(json.dumps(line).encode() + b"\n")

    def _line(self, message: dict) -> dict:
        now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        return {
            "model": self.model,
            "created_at": now,
            "message": {"role": "assistant", **message},
        }

    def start(self) -> None:
        self._started = self._first = time.monotonic()

    def said(self, kind: str, text: str, begins: bool) -> None:
        if len(self.parts) == 1 and begins:
            self._first = time.monotonic()
        self._send({"content" if kind == "text" else "thinking": text})

    def call(self, id: str, name: str, arguments: str) -> None:
        self._send({"tool_calls": [_call(id, name, arguments)]})

    def end(self) -> None:
        self._ended = time.monotonic()
        if self.streams:
            self.write(json.dumps(self._last({"content": ""})).encode() + b"\n")

    def _last(self, message: dict) -> dict:
        spans = {
            "total_duration": self._ended - self._began,
            "load_duration": 0.0,  # the model was loaded when the server started
            "prompt_eval_duration": self._first - self._started,
            "eval_duration": self._ended - self._first,
        }
        return self._line(message) | {
            "done": True,
            "done_reason": "length" if self.reason == "length" else "stop",
            **{name: round(1e9 * seconds) for name, seconds in spans.items()},
            "prompt_eval_count": self.counts.prompt,
            "eval_count": self.counts.reply,
            "kv": self.kv,
        }

    def document(self) -> dict:
        message = {
            name: "".join(one for what, one, *_ in self.parts if what == kind)
            for name, kind in (("content", "text"), ("thinking", "thinking"))
        }
        message = {name: text for name, text in message.items() if text or name == "content"}
        calls = [_call(*said) for kind, *said in self.parts if kind == "call"]
        return self._last(message | ({"tool_calls": calls} if calls else {}))

    def failed(self, refused: Refused) -> bytes:
        return json.dumps(error_body(refused)).encode() + b"\n"


def _call(id: str, name: str, arguments: str) -> dict:
    return {"id": id, "function": {"name": name, "arguments": json.loads(arguments)}}


def tags(name: str, about: dict) -> dict:
    """What clients read at /api/tags. about: of the model, as `Site.about` has it."""
    return {"models": [_listed(name, about)]}


def _listed(name: str, about: dict) -> dict:
    return {
        "name": name,
        "model": name,
        "modified_at": about["since"],
        "size": about["bytes"],
        "digest": sha256(about["fingerprint"].encode()).hexdigest(),
        "details": _details(about),
    }


def _details(about: dict) -> dict:
    family = about["family"]
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family],
        "parameter_size": about["parameters"],
        "quantization_level": about["kv"],
    }


def show(raw: bytes, name: str, about: dict) -> dict:
    """What clients read at /api/show. Raises Refused."""
    body = document(raw)
    wanted = model_of({"model": body.get("model") or body.get("name")}, name)
    if wanted != name:
        raise Refused(404, f"[model] no such model; choose {name!r}", "model_not_found")
    able = ["completion", *("tools",) * about["tools"], *("thinking",) * about["thinks"]]
    family = about["family"]
    info = {"general.architecture": family, f"{family}.context_length": about["context"]}
    return {
        "details": _details(about),
        "modified_at": about["since"],
        "model_info": info,
        "capabilities": able,
        "template": about["template"],
    }
