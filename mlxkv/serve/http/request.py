"""One request for a reply: read from JSON once, every field checked, nothing unknown kept.

Fields that could change what is computed, and that the server does not have, are refused; so is a name
that is almost one of ours: it would be a typing error. What else clients send is dropped.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from mlxkv.models.catalog.option_checks import RESERVED
from mlxkv.models.loading.sampling import Sampling
from mlxkv.models.roles import joined
from mlxkv.serve.grammar import Calls, of_choice, of_format
from mlxkv.serve.http.fields import Fields, bad, call, mistyped
from mlxkv.serve.refusals import Refused

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content")
DEFAULT_NAMES = ("default", "default_model")
STOPS, STOP_LENGTH = 16, 256
LOGIT_BIASES = 1024
ALTERNATIVES = 20  # of a token, as at OpenAI
NAME_LENGTH = 512
TOOL_MARKS = "_ . : / @ -"
TOOL_NAME = re.compile(rf"[\w.:/@-]{{1,{NAME_LENGTH}}}")
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
# 16-bit logits are divided by it: anything colder is greedy. Log-probabilities of the best token, about -12 at
# the least, stay numbers in float16.
COLDEST = 1e-3
LEAST_PENALTY = 0.01  # logits are divided by it, and have to stay numbers in float16
LEAST_TOP_P = 1e-6  # what float32 tells from 0 beside 1: the best token alone
NUMBER = (int, float)


def _limits(kind: type | tuple, low: float, high: float, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"limits": (kind, low, high)})


@dataclass(frozen=True)
class Request:
    """Fields have the names of OpenAI's API and of mlx-lm's server.

    chat: whether `messages` (with `tools`, `chat_template_kwargs`) are to be answered, or `prompt` to
    be continued, a text or its tokens. continue_final_message: the last message is the start of the reply, which
    goes on (as in vLLM and transformers). include_usage: whether a stream ends with counts. top_logprobs: -1 for
    none. user, cache_salt: whose caches are used, within an API key. grammar: llguidance's, which the reply follows,
    or None.
    shorten: whether the reply may be shorter than `max_tokens` where memory has no room for it.
    """

    chat: bool
    stream: bool
    include_usage: bool
    stop: list[str]
    logprobs: bool
    top_logprobs: int
    logit_bias: dict[int, float] | None
    prompt: str | list[int] = ""
    messages: list[dict] = dataclasses.field(default_factory=list)
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
    seed: int | None = _limits(int, -(1 << 63), (1 << 63) - 1, None)
    max_tokens: int = _limits(int, 1, 1 << 24, 512)


# Numbers by field: (type, lowest, highest).
NUMBERS = {one.name: one.metadata["limits"] for one in dataclasses.fields(Request) if one.metadata}
NUMBERS["max_completion_tokens"] = NUMBERS["max_tokens"]  # OpenAI's newer name

ENDLESS = -1  # as max_tokens, as in llama.cpp: until the context or the memory is full
# Fields that mean something here, and all that are taken.
TAKEN = (
    *NUMBERS,
    *("model", "kv", "stream", "stream_options", "stop", "logprobs", "top_logprobs", "logit_bias"),
    *("prompt", "messages", "tools", "chat_template_kwargs", "continue_final_message"),
    *("user", "cache_salt", "response_format", "tool_choice"),
)


@dataclass(frozen=True)
class ModelInfo:
    """What requests are checked against: the names of the model and of its preset; the longest reply,
    and the one of a request that names none; the size of the vocabulary; how
    the model's tool calls begin and end; how its makers want replies drawn; what the model takes, where that is
    known; whether schemas may be compiled here. Counts are in tokens."""

    model: str
    kv: str
    longest: int
    max_tokens: int
    vocabulary: int
    calls: Calls | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    context: int | None = None
    compiles: bool = True


def check_request(body: dict, chat: bool, model_info: ModelInfo, shorten: bool = False) -> Request:
    """Return the request of a JSON object. chat: whether it came to the path of chats. shorten: of the request. Raises
    Refused, which names the field."""
    body = {key: value for key, value in body.items() if value is not None}
    mistyped(body, TAKEN)
    for name, values in ONLY.items():
        if name in body and (type(body[name]), body[name]) not in [(type(x), x) for x in values]:
            only = f"only {json.dumps(values[0])} is supported" if values else "not supported"
            raise bad(name, only, body[name])
    model = body.get("model", model_info.model)
    if model not in (model_info.model, *DEFAULT_NAMES):
        raise no_model(str(model)[:80], (model_info.model,))
    kv = body.get("kv", model_info.kv)
    if kv != model_info.kv:  # a batch has one kind of cache
        raise bad(
            "kv", f"this server's caches are {model_info.kv}; choose that, or start another", kv
        )
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) == ENDLESS:
            body, shorten = body | {name: model_info.longest}, True
    fields = Fields(body)
    options = Fields(fields.object("stream_options"), "stream_options")
    content: dict[str, Any] = (
        _chat(fields) if chat else {"prompt": _text(body, model_info.vocabulary)}
    )
    return Request(
        chat=chat,
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage"),
        **_numbers(body, model_info),
        stop=_stop(body),
        **_logprobs(body, chat),
        logit_bias=_logit_bias(body, model_info.vocabulary),
        grammar=_grammar(body, content, model_info),
        shorten=shorten,
        **{name: _name(body, name) for name in ("user", "cache_salt")},
        **content,
    )


def no_model(name: str, names: tuple[str, ...]) -> Refused:
    choices = " or ".join(map(repr, names))
    return Refused(404, f"[model] no such model; got {name!r}; choose {choices}", "model_not_found")


def _grammar(body: dict, content: dict, model_info: ModelInfo) -> str | None:
    """Return what the reply follows: a format, or a call of a tool. Takes the tools out of `content` for "none"."""
    choice = body.get("tool_choice", "auto")
    if choice == "none":
        content.pop("tools", None)
    call = of_choice(choice, content.get("tools"), model_info.calls, model_info.compiles)
    form = of_format(body.get("response_format"), model_info.compiles)
    if call and form:
        raise bad("tool_choice", "a call follows no response_format; leave one of them out", choice)
    return call or form


def _name(body: dict, name: str) -> str:
    value = Fields(body).text(name)
    if len(value) > NAME_LENGTH:
        raise bad(name, f"must be a text of at most {NAME_LENGTH} characters", value)
    return value


def _numbers(body: dict, model_info: ModelInfo) -> dict:
    out = asdict(model_info.sampling)
    for name, (kind, low, high) in NUMBERS.items():
        if name not in body:
            continue
        value = body[name]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise bad(name, f"must be {'an integer' if kind is int else 'a number'}", value)
        if not low <= value <= high or not isfinite(value):
            raise bad(name, f"must be from {low} to {high}", value)
        out[name] = value if kind is int else float(value)
    max_tokens = out.pop("max_completion_tokens", None) or out.get("max_tokens")
    out["max_tokens"] = min(max_tokens, model_info.longest) if max_tokens else model_info.max_tokens
    if out.get("top_k", 0) >= model_info.vocabulary:
        out["top_k"] = 0  # all of them: mlx-lm's sampler raises in the thread of all requests
    if out.get("temperature", 0) < COLDEST:
        out["temperature"] = 0.0
    if (out.get("seed") or 0) < 0:
        del out["seed"]  # any, as in llama.cpp
    if out.get("top_p", 0) > 0:  # mlx-lm takes 0 for "all of them"
        out["top_p"] = max(out["top_p"], LEAST_TOP_P)
    penalty = out.get("repetition_penalty", 0)
    if 0 < penalty < LEAST_PENALTY:
        reason = f"must be 0 for none, or from {LEAST_PENALTY} to 100"
        raise bad("repetition_penalty", reason, penalty)
    return out


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
    top, name = body.get("top_logprobs", -1), "top_logprobs"
    if not chat and type(body.get("logprobs")) is int:
        top, name = body["logprobs"] or -1, "logprobs"
        body = body | {"logprobs": True}
    if type(top) is not int or not -1 <= top <= ALTERNATIVES:
        raise bad(name, f"must be from 0 to {ALTERNATIVES}", top)
    return {"logprobs": Fields(body).flag("logprobs"), "top_logprobs": top}


def _logit_bias(body: dict, vocabulary: int) -> dict[int, float] | None:
    bias = Fields(body).object("logit_bias")
    if len(bias) > LOGIT_BIASES:
        raise bad("logit_bias", f"must be an object of at most {LOGIT_BIASES} tokens", bias)
    for token, value in bias.items():
        known = token.isascii() and token.isdigit() and len(token) < 10
        if not known or int(token) >= vocabulary:
            raise bad("logit_bias", f"must name tokens by number, below {vocabulary}", token)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 100:
            raise bad("logit_bias", "must be from -100 to 100", value)
    return {int(token): float(value) for token, value in bias.items()} or None


def _text(body: dict, vocabulary: int) -> str | list[int]:
    """Return the prompt: a text, or numbers of tokens, alone or as the one element of a list."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(type(x) is int for x in prompt):
        raise bad("prompt", "must be one text, or one list of tokens, not empty", prompt)
    for token in prompt:
        if not 0 <= token < vocabulary:
            raise bad("prompt", f"must name tokens by number, below {vocabulary}", token)
    return prompt


def _chat(fields: Fields) -> dict:
    messages = joined([_message(message) for message in fields.objects("messages")])
    if not messages:
        raise fields.bad("messages", "must be a list that is not empty")
    for tool in fields.objects("tools", optional=True):
        if not isinstance(tool.body.get("function"), dict):
            raise bad(tool.path, "must be an object with a function", tool.body)
        function = Fields(tool.body["function"], tool.place("function"))
        if not TOOL_NAME.fullmatch(function.named("name")):  # marks and special tokens end the call
            reason = f"must be letters, digits and {TOOL_MARKS}, at most {NAME_LENGTH}"
            raise function.bad("name", reason)
    extra = fields.object("chat_template_kwargs")
    if any(k in RESERVED or not isinstance(x, str | bool | int | float) for k, x in extra.items()):
        raise bad("chat_template_kwargs", "must be plain values, of names that are free", extra)
    more = fields.flag("continue_final_message")
    if more and (len(messages) < 2 or messages[-1]["role"] != "assistant"):
        reason = "needs a last message of the assistant behind others"
        raise bad("continue_final_message", reason, more)
    return {
        "messages": messages,
        "tools": fields.body.get("tools") or None,
        "chat_template_kwargs": extra or None,
        "continue_final_message": more,
    }


def _message(message: Fields) -> dict:
    role = message.body.get("role")
    if role not in ROLES:
        raise message.bad("role", f"unknown role; choose from {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": "system" if role == "developer" else role}
    out["content"] = message.content("content")
    texts = {name: message.get(name, str, None) for name in TEXTS}
    out |= {name: text for name, text in texts.items() if text is not None}
    if calls := message.objects("tool_calls", optional=True):
        out["tool_calls"] = [_tool_call(each) for each in calls]
    return out


def _tool_call(asked: Fields) -> dict:
    function = Fields(asked.object("function"), asked.place("function"))
    arguments = function.body.get("arguments") or "{}"
    return call(str(asked.body.get("id") or ""), function.named("name"), arguments)
