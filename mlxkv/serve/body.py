"""What a request's body may hold: every field checked, nothing unknown handed on.

mlx-lm's handler reads the body that comes out. Fields that could change what is computed and that
the server does not have are refused, not ignored; the rest of what clients send along is dropped.
"""

from __future__ import annotations

import json
from math import isfinite

from mlxkv.serve.refusals import Refused

ROLES = ("system", "developer", "user", "assistant", "tool")
STOPS, STOP_LENGTH = 16, 256
LOGIT_BIASES = 1024
# Arguments of transformers' apply_chat_template: the server's own. Some change what comes back, and a
# prompt can be padded to any length before anything is counted.
RESERVED = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
)
# Numbers: (kinds, lowest, highest).
NUMBERS: dict[str, tuple[type | tuple, float, float]] = {
    "temperature": ((int, float), 0, 100),
    "top_p": ((int, float), 0, 1),
    "top_k": (int, 0, 1 << 20),
    "min_p": ((int, float), 0, 1),
    "repetition_penalty": ((int, float), 0, 100),
    "repetition_context_size": (int, 0, 1 << 20),
    "presence_penalty": ((int, float), -100, 100),
    "presence_context_size": (int, 0, 1 << 20),
    "frequency_penalty": ((int, float), -100, 100),
    "frequency_context_size": (int, 0, 1 << 20),
    "xtc_probability": ((int, float), 0, 1),
    "xtc_threshold": ((int, float), 0, 0.5),
    "seed": (int, 0, (1 << 63) - 1),
    "max_tokens": (int, 1, 1 << 24),
    "max_completion_tokens": (int, 1, 1 << 24),
}
FLOATS = ("xtc_probability", "xtc_threshold")  # mlx-lm takes no integers here
# Fields whose only value here is this one.
ONLY: dict[str, tuple] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "adapters": (),
    "draft_model": (),
    "role_mapping": (),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
}


def bad(field: str, what: str, got: object = None) -> Refused:
    shown = json.dumps(got, default=str)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return Refused(400, f"[{field}] {what}; got {shown}", "invalid_value")


def parse(raw: bytes) -> dict:
    """The JSON object of a body. Raises Refused."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        json.dumps(body, ensure_ascii=False).encode()  # no half of a surrogate pair
    except UnicodeError:
        raise Refused(
            400, "[body] not UTF-8, or text that is not Unicode", "invalid_json"
        ) from None
    except RecursionError:
        raise Refused(400, "[body] nested too deeply", "invalid_json") from None
    except ValueError as error:
        raise Refused(400, f"[body] not JSON: {error}"[:200], "invalid_json") from None
    if not isinstance(body, dict):
        raise bad("body", "must be a JSON object", body)
    return body


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def check(body: dict, chat: bool, model: str, kv: str, most_tokens: int, vocabulary: int) -> dict:
    """What mlx-lm's handler is to read. model, kv: the only ones served. most_tokens: upper limit of a
    reply, where the client asks for more. vocabulary: of the model. Raises Refused."""
    body = {key: value for key, value in body.items() if value is not None}
    for field, values in ONLY.items():
        if field in body and not any(_same(body[field], value) for value in values):
            choices = f"; choose {json.dumps(values[0])}" if values else ", leave it out"
            raise bad(field, f"this server does not have it{choices}", body[field])
    name = body.get("model", model)
    if name not in (model, "default_model", "default"):
        raise Refused(
            404,
            f"[model] no such model; got {str(name)[:80]!r}; choose {model!r}",
            "model_not_found",
        )
    if body.get("kv", kv) != kv:  # one batch, one kind of cache
        raise bad("kv", f"this server's caches are {kv}; choose that, or start another", body["kv"])
    out = {"model": model, "stream": _boolean(body, "stream")}
    out |= _numbers(body)
    for field in ("max_tokens", "max_completion_tokens"):
        if field in out:
            out[field] = min(out[field], most_tokens)
    if out.get("top_k", 0) >= vocabulary:
        out["top_k"] = 0  # all: mlx-lm's sampler raises, in the thread of all requests
    out |= (
        _stream_options(body) | _stop(body) | _logprobs(body, chat) | _logit_bias(body, vocabulary)
    )
    return out | (_chat(body) if chat else _text(body))


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def _boolean(body: dict, field: str) -> bool:
    value = body.get(field, False)
    if not isinstance(value, bool):
        raise bad(field, "must be true or false", value)
    return value


def _numbers(body: dict) -> dict:
    out = {}
    for field, (kinds, low, high) in NUMBERS.items():
        if field not in body:
            continue
        value = body[field]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise bad(field, f"must be {'an integer' if kinds is int else 'a number'}", value)
        if not low <= value <= high or not isfinite(value):
            raise bad(field, f"must be from {low:g} to {high:g}", value)
        out[field] = float(value) if field in FLOATS else value
    return out


def _stream_options(body: dict) -> dict:
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise bad("stream_options", "must be an object", options)
    wanted = options.get("include_usage", False)
    if not isinstance(wanted, bool):
        raise bad("stream_options.include_usage", "must be true or false", wanted)
    return {"stream_options": {"include_usage": wanted}}


def _stop(body: dict) -> dict:
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(word, str) and word for word in stop):
        raise bad("stop", "must be a string, or a list of strings, none empty", stop)
    if len(stop) > STOPS or any(len(word) > STOP_LENGTH for word in stop):
        raise bad("stop", f"at most {STOPS} strings of {STOP_LENGTH} characters", stop)
    return {"stop": stop}


def _logprobs(body: dict, chat: bool) -> dict:
    """Text completions ask by a number of alternatives, chats by a yes and a number."""
    wanted, top, field = body.get("logprobs", False), body.get("top_logprobs", -1), "top_logprobs"
    if not chat and type(wanted) is int:
        wanted, top, field = True, wanted or -1, "logprobs"
    if not isinstance(wanted, bool):
        raise bad("logprobs", "must be true or false", wanted)
    if type(top) is not int or not (top == -1 or 0 <= top <= 11):
        raise bad(field, "must be from 0 to 11", top)
    return {"logprobs": wanted, "top_logprobs": top}


def _logit_bias(body: dict, vocabulary: int) -> dict:
    bias = body.get("logit_bias", {})
    if not isinstance(bias, dict) or len(bias) > LOGIT_BIASES:
        raise bad("logit_bias", f"must be an object of at most {LOGIT_BIASES} tokens", bias)
    for token, value in bias.items():
        known = token.isascii() and token.isdigit() and len(token) < 10
        if not known or int(token) >= vocabulary:
            raise bad("logit_bias", f"must name tokens by number, below {vocabulary}", token)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 100:
            raise bad("logit_bias", "must be from -100 to 100", value)
    return {"logit_bias": bias} if bias else {}


def _text(body: dict) -> dict:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise bad("prompt", "must be a text that is not empty", prompt)
    return {"prompt": prompt}


def _chat(body: dict) -> dict:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "must be a list that is not empty", messages)
    out: dict = {"messages": [_message(i, message) for i, message in enumerate(messages)]}
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise bad("tools", "must be a list of objects with a function", tools)
    if tools:
        out["tools"] = tools
    extra = body.get("chat_template_kwargs", {})
    if not isinstance(extra, dict) or any(
        name in RESERVED or not isinstance(value, str | bool | int | float)
        for name, value in extra.items()
    ):
        raise bad("chat_template_kwargs", "must be plain values, of names that are free", extra)
    if extra:
        out["chat_template_kwargs"] = extra
    return out


def _message(index: int, message: object) -> dict:
    where = f"messages.{index}"
    if not isinstance(message, dict):
        raise bad(where, "must be an object", message)
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role", f"unknown role; choose from {', '.join(ROLES)}", role)
    out = {"role": "system" if role == "developer" else role, "content": _content(where, message)}
    for field in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(field) is not None:
            if not isinstance(message[field], str):
                raise bad(f"{where}.{field}", "must be a text", message[field])
            out[field] = message[field]
    if message.get("tool_calls"):
        out["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    return out


def _content(where: str, message: dict) -> str:
    """Text; parts are joined, so that nothing but text goes on to mlx-lm (which fetches images)."""
    content = message.get("content")
    text = "" if content is None else content
    parts = content if isinstance(content, list) else [{"type": "text", "text": text}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise bad(f"{where}.content", "only parts of type text are taken", part)
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}.content", "must be text", part.get("text"))
    return "".join(part["text"] for part in parts)


def _tool_calls(where: str, calls: object) -> list:
    """With their arguments as text that is JSON: mlx-lm reads it."""
    if not isinstance(calls, list):
        raise bad(where, "must be a list", calls)
    out = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(where, "must be objects with a function that has a name", call)
        arguments = function.get("arguments") or "{}"
        try:
            read = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise bad(f"{where}.arguments", "must be a JSON object", arguments)
        out.append(
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": function["name"], "arguments": json.dumps(read)},
            }
        )
    return out
