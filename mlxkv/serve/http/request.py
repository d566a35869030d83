"""One request for a reply: read from JSON once, every field checked, nothing unknown kept.

Fields that could change what is computed, and that the server does not have, are refused; so is a name
that no client of such servers has: it would be a typing error. What else clients send is dropped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from math import isfinite
from typing import Any

from mlxkv.models.catalog.asked import RESERVED
from mlxkv.models.loading.sampling import Sampling
from mlxkv.serve.grammar import Calls, of_choice, of_format
from mlxkv.serve.http.fields import IGNORED
from mlxkv.serve.refusals import Refused

ROLES = ("system", "developer", "user", "assistant", "tool")
STOPS, STOP_LENGTH = 16, 256
LOGIT_BIASES = 1024
NAME_LENGTH = 512
# Fields that may only have one of these values.
ONLY: dict[str, tuple] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "adapters": (),
    "draft_model": (),
    "role_mapping": (),
    "functions": ([],),
    "modalities": (["text"],),
}
DEPTH = 64  # lists and objects inside one another
# 16-bit logits are divided by it: anything colder is greedy. Log-probabilities of the best token, about -12 at
# the least, stay numbers in float16.
COLDEST = 1e-3
LEAST_PENALTY = 0.01  # logits are divided by it, and have to stay numbers in float16
LEAST_TOP_P = 1e-6  # what float32 tells from 0 beside 1: the best token alone
NUMBER = (int, float)


def _limits(kind: type | tuple, low: float, high: float, default: Any) -> Any:
    return field(default=default, metadata={"limits": (kind, low, high)})


@dataclass(frozen=True)
class Request:
    """Fields have the names of OpenAI's API and of mlx-lm's server.

    chat: whether `messages` (with `tools`, `chat_template_kwargs`) are to be answered, or `prompt` to
    be continued. continue_final_message: the last message is the start of the reply, which goes on (as in vLLM
    and transformers). include_usage: whether a stream ends with counts. top_logprobs: -1 for none. user,
    cache_salt: whose caches are used, within an API key. grammar: llguidance's, which the reply follows, or
    None. images: of the messages, which say how many are theirs.
    shorten: whether the reply may be shorter than `max_tokens` where memory has no room for it.
    """

    chat: bool
    stream: bool
    include_usage: bool
    stop: list[str]
    logprobs: bool
    top_logprobs: int
    logit_bias: dict[int, float] | None
    prompt: str = ""
    messages: list[dict] = field(default_factory=list)
    tools: list[dict] | None = None
    chat_template_kwargs: dict | None = None
    continue_final_message: bool = False
    grammar: str | None = None
    shorten: bool = False
    user: str = ""
    cache_salt: str = ""
    temperature: float = _limits(NUMBER, 0, 100, 0.0)
    top_p: float = _limits(NUMBER, 0, 1, 1.0)
    top_k: int = _limits(int, 0, 1 << 20, 0)
    min_p: float = _limits(NUMBER, 0, 1, 0.0)
    repetition_penalty: float = _limits(NUMBER, 0, 100, 0.0)  # 0: none
    repetition_context_size: int = _limits(int, 0, 1 << 20, 20)
    presence_penalty: float = _limits(NUMBER, -100, 100, 0.0)
    presence_context_size: int = _limits(int, 0, 1 << 20, 20)
    frequency_penalty: float = _limits(NUMBER, -100, 100, 0.0)
    frequency_context_size: int = _limits(int, 0, 1 << 20, 20)
    xtc_probability: float = _limits(NUMBER, 0, 1, 0.0)
    xtc_threshold: float = _limits(NUMBER, 0, 0.5, 0.1)
    seed: int | None = _limits(int, 0, (1 << 63) - 1, None)
    max_tokens: int = _limits(int, 1, 1 << 24, 512)


# Numbers by field: (type, lowest, highest).
NUMBERS = {one.name: one.metadata["limits"] for one in fields(Request) if one.metadata}
NUMBERS["max_completion_tokens"] = NUMBERS["max_tokens"]  # OpenAI's newer name


ENDLESS = -1  # as max_tokens, as in llama.cpp: until the context or the memory is full
# Fields that mean something here, and all that are taken.
TAKEN = (
    *NUMBERS,
    *("model", "kv", "stream", "stream_options", "stop", "logprobs", "top_logprobs", "logit_bias"),
    *("prompt", "messages", "tools", "chat_template_kwargs", "continue_final_message"),
    *("user", "cache_salt", "response_format", "tool_choice"),
)
KNOWN = frozenset((*TAKEN, *ONLY)) | IGNORED


@dataclass(frozen=True)
class Served:
    """What requests are checked against: the names of the model and of its preset; the longest reply,
    and the one of a request that names none; the size of the vocabulary; how
    the model's tool calls begin and end; how its makers want replies drawn. Counts are in tokens."""

    model: str
    kv: str
    longest: int
    max_tokens: int
    vocabulary: int
    calls: Calls | None = None
    sampling: Sampling = field(default_factory=Sampling)


def bad(name: str, what: str, got: object = None) -> Refused:
    shown = json.dumps(got, default=str)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return Refused(400, f"[{name}] {what}; got {shown}", "invalid_value")


def _plain(name: str) -> str:
    """A name that a client made up, in one line."""
    return json.dumps(name[:60])[1:-1]


def parse(raw: bytes, chat: bool, served: Served) -> Request:
    """The request in a body. chat: whether it came to the path of chats. Raises Refused."""
    return check(document(raw), chat, served)


def document(raw: bytes) -> dict:
    """The JSON object in a body, of bounded depth. Raises Refused."""
    try:
        body = json.loads(
            raw.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite_float
        )
        if isinstance(body, list | dict) and not shallow(body):
            raise RecursionError
        json.dumps(body, ensure_ascii=False).encode()  # raises at half of a surrogate pair
    except UnicodeError:
        raise Refused(
            400, "[body] not UTF-8, or text that is not Unicode", "invalid_json"
        ) from None
    except RecursionError:
        raise Refused(
            400, f"[body] nested too deeply; at most {DEPTH} levels", "invalid_json"
        ) from None
    except ValueError as error:
        raise Refused(400, f"[body] not JSON: {error}"[:200], "invalid_json") from None
    if not isinstance(body, dict):
        raise bad("body", "must be a JSON object", body)
    return body


def shallow(value: object, depth: int = DEPTH) -> bool:
    """Return whether the lists and objects of a list or object are nested at most `depth` deep."""
    inside = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(
        shallow(one, depth - 1) for one in inside if isinstance(one, list | dict)
    )


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    if isfinite(number := float(text)):
        return number
    raise ValueError(f"a number beyond all limits; got {text[:20]}")


def check(body: dict, chat: bool, served: Served, shorten: bool = False) -> Request:
    """The request of a JSON object. shorten: of the request. Raises Refused, which names the field."""
    body = {key: value for key, value in body.items() if value is not None}
    for name in body.keys() - KNOWN:
        close = get_close_matches(name[:40], TAKEN, 1)
        meant = f"; did you mean {close[0]}?" if close else "; leave it out"
        raise Refused(400, f"[{_plain(name)}] no such field{meant}"[:200], "unknown_parameter")
    for name, values in ONLY.items():
        if name in body and not any(_same(body[name], value) for value in values):
            choices = f"; choose {json.dumps(values[0])}" if values else ", leave it out"
            raise bad(name, f"this server does not have it{choices}", body[name])
    model = body.get("model", served.model)
    if model not in (served.model, "default_model", "default"):
        raise Refused(
            404,
            f"[model] no such model; got {str(model)[:80]!r}; choose {served.model!r}",
            "model_not_found",
        )
    kv = body.get("kv", served.kv)
    if kv != served.kv:  # a batch has one kind of cache
        raise bad("kv", f"this server's caches are {served.kv}; choose that, or start another", kv)
    stream = _boolean(body, "stream")
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) == ENDLESS:
            body, shorten = body | {name: served.longest}, True
    numbers = asdict(served.sampling) | _numbers(body)
    max_tokens = numbers.pop("max_completion_tokens", None) or numbers.get("max_tokens")
    if max_tokens is not None:
        max_tokens = min(max_tokens, served.longest)
    numbers["max_tokens"] = max_tokens or served.max_tokens
    if numbers.get("top_k", 0) >= served.vocabulary:
        numbers["top_k"] = 0  # all of them: mlx-lm's sampler raises in the thread of all requests
    if numbers.get("temperature", 0) < COLDEST:
        numbers["temperature"] = 0.0
    if numbers.get("top_p", 0) > 0:  # mlx-lm takes 0 for "all of them"
        numbers["top_p"] = max(numbers["top_p"], LEAST_TOP_P)
    penalty = numbers.get("repetition_penalty", 0)
    if 0 < penalty < LEAST_PENALTY:
        what = f"must be 0 for none, or from {LEAST_PENALTY:g} to 100"
        raise bad("repetition_penalty", what, penalty)
    said = _chat(body) if chat else _text(body)
    return Request(
        chat=chat,
        stream=stream,
        **numbers,
        include_usage=_include_usage(body),
        stop=_stop(body),
        **_logprobs(body, chat),
        logit_bias=_logit_bias(body, served.vocabulary),
        grammar=_grammar(body, said, served.calls),
        shorten=shorten,
        **{name: _name(body, name) for name in ("user", "cache_salt")},
        **said,
    )


def _grammar(body: dict, said: dict, calls: Calls | None) -> str | None:
    """Return what the reply follows: a format, or a call of a tool. Takes the tools out of `said` for "none"."""
    choice = body.get("tool_choice")
    choice = "auto" if choice is None else choice
    if choice == "none" and "tools" in said:
        said["tools"] = None
    call, form = of_choice(choice, said.get("tools"), calls), of_format(body.get("response_format"))
    if call and form:
        raise bad("tool_choice", "a call follows no response_format; leave one of them out", choice)
    return call or form


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def _boolean(body: dict, name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise bad(name, "must be true or false", value)
    return value


def _name(body: dict, name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str) or len(value) > NAME_LENGTH:
        raise bad(name, f"must be a text of at most {NAME_LENGTH} characters", value)
    return value


def _numbers(body: dict) -> dict:
    out = {}
    for name, (kind, low, high) in NUMBERS.items():
        if name not in body:
            continue
        value = body[name]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise bad(name, f"must be {'an integer' if kind is int else 'a number'}", value)
        if not low <= value <= high or not isfinite(value):
            raise bad(name, f"must be from {low:g} to {high:g}", value)
        out[name] = value if kind is int else float(value)
    return out


def _include_usage(body: dict) -> bool:
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise bad("stream_options", "must be an object", options)
    wanted = options.get("include_usage", False)
    if not isinstance(wanted, bool):
        raise bad("stream_options.include_usage", "must be true or false", wanted)
    return wanted


def _stop(body: dict) -> list[str]:
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(word, str) and word for word in stop):
        raise bad("stop", "must be a string, or a list of strings, none empty", stop)
    if len(stop) > STOPS or any(len(word) > STOP_LENGTH for word in stop):
        raise bad("stop", f"at most {STOPS} strings of {STOP_LENGTH} characters", stop)
    return stop


def _logprobs(body: dict, chat: bool) -> dict:
    """Text completions ask with a number of alternatives, chats with a boolean and a number."""
    wanted, top, name = body.get("logprobs", False), body.get("top_logprobs", -1), "top_logprobs"
    if not chat and type(wanted) is int:
        wanted, top, name = True, wanted or -1, "logprobs"
    if not isinstance(wanted, bool):
        raise bad("logprobs", "must be true or false", wanted)
    if type(top) is not int or not (top == -1 or 0 <= top <= 11):
        raise bad(name, "must be from 0 to 11", top)
    return {"logprobs": wanted, "top_logprobs": top}


def _logit_bias(body: dict, vocabulary: int) -> dict[int, float] | None:
    bias = body.get("logit_bias", {})
    if not isinstance(bias, dict) or len(bias) > LOGIT_BIASES:
        raise bad("logit_bias", f"must be an object of at most {LOGIT_BIASES} tokens", bias)
    for token, value in bias.items():
        known = token.isascii() and token.isdigit() and len(token) < 10
        if not known or int(token) >= vocabulary:
            raise bad("logit_bias", f"must name tokens by number, below {vocabulary}", token)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 100:
            raise bad("logit_bias", "must be from -100 to 100", value)
    return {int(token): float(value) for token, value in bias.items()} or None


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
    messages = [_message(i, message) for i, message in enumerate(messages)]
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise bad("tools", "must be a list of objects with a function", tools)
    extra = body.get("chat_template_kwargs", {})
    if not isinstance(extra, dict) or any(
        name in RESERVED or not isinstance(value, str | bool | int | float)
        for name, value in extra.items()
    ):
        raise bad("chat_template_kwargs", "must be plain values, of names that are free", extra)
    more = _boolean(body, "continue_final_message")
    if more and (len(messages) < 2 or messages[-1]["role"] != "assistant"):
        raise bad(
            "continue_final_message", "needs a last message of the assistant behind others", more
        )
    return {
        "messages": messages,
        "tools": tools or None,
        "chat_template_kwargs": extra or None,
        "continue_final_message": more,
    }


def _message(index: int, message: object) -> dict:
    where = f"messages.{index}"
    if not isinstance(message, dict):
        raise bad(where, "must be an object", message)
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role", f"unknown role; choose from {', '.join(ROLES)}", role)
    out = {"role": "system" if role == "developer" else role, "content": _content(where, message)}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise bad(f"{where}.{name}", "must be a text", message[name])
            out[name] = message[name]
    if message.get("tool_calls"):
        out["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    return out


def _content(where: str, message: dict) -> str:
    """Text, its parts joined: mlx-lm would fetch the images of other parts."""
    content = message.get("content")
    text = "" if content is None else content
    parts = content if isinstance(content, list) else [{"type": "text", "text": text}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = str(part.get("type")) if isinstance(part, dict) else ""
            what = "no images are taken" if "image" in kind else "only parts of type text are taken"
            raise bad(f"{where}.content", what, part)
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}.content", "must be text", part.get("text"))
    return "".join(part["text"] for part in parts)


def _tool_calls(where: str, calls: object) -> list:
    """Calls with their arguments as JSON text, which mlx-lm reads for the template."""
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
            text = json.dumps(read, allow_nan=False)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict) or not shallow(read):
            raise bad(f"{where}.arguments", "must be a JSON object", arguments)
        out.append(
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": function["name"], "arguments": text},
            }
        )
    return out
