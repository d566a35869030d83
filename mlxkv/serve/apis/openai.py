"""OpenAI's chat and text completions: requests and replies."""

from __future__ import annotations

import time
from functools import lru_cache
from platform import platform
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

import mlx.core as mx
import mlx_lm
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from mlxkv.generate.roles import joined
from mlxkv.serve.apis.body import (
    Body,
    Choice,
    Content,
    Format,
    Label,
    Length,
    Named,
    Object,
    StopWords,
    ToolName,
    between,
    only,
    text_of,
    tool_call,
)
from mlxkv.serve.apis.reply import Reply, event
from mlxkv.serve.grammar import ANY_OBJECT
from mlxkv.serve.refusals import Refused, bad
from mlxkv.serve.request import ModelInfo, Request, Start, Token

LOGIT_BIASES = 1024
ALTERNATIVES = 20  # per token, as in OpenAI's API
LEAST_PENALTY = 0.01  # logits are divided by it and must stay finite in float16
SPOKEN = ("text", "thinking")


# -- requests


def _penalty(value: float) -> float:
    if value and not LEAST_PENALTY <= value <= 100:
        raise ValueError(f"must be 0 for none, or from {LEAST_PENALTY} to 100")
    return value


def _biases(values: dict[str, float]) -> dict[str, float]:
    if len(values) > LOGIT_BIASES:
        raise ValueError(f"must be an object of at most {LOGIT_BIASES} tokens")
    for value in values.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 100:
            raise ValueError("must be from -100 to 100")
    return values


def _choice(value: Any) -> Choice:
    match value:
        case "auto" | "none" | "required":
            return Choice(value)
        case {"function": {"name": str(name)}}:
            return Choice("required", name)
    raise ValueError('must be auto, none, required, or {"type": "function", ...}')


def _alternatives(value: Any) -> int:
    """Return the number of alternatives: text completions pass a number, or a boolean as chats do."""
    if type(value) is bool:
        return -1 if value else NO_LOGPROBS
    if type(value) is not int or not -1 <= value <= ALTERNATIVES:
        raise ValueError(f"must be from 0 to {ALTERNATIVES}")
    return value or -1


NO_LOGPROBS = -2
Biases = Annotated[dict[str, Any], AfterValidator(_biases)]
ToolChoice = Annotated[Choice, PlainValidator(_choice)]
Count = Annotated[int, between(0, 1 << 20)]
Penalty = Annotated[float, between(-100, 100)]


class StreamOptions(Object):
    include_usage: bool = False


class JSONSchema(Object):
    schema_: Any = Field(default_factory=lambda: ANY_OBJECT, alias="schema")


class ResponseFormat(Object):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    def form(self) -> Format | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Format("response_format", ANY_OBJECT)
        schema = self.json_schema and self.json_schema.schema_
        return Format("response_format.json_schema.schema", schema)


class CalledFunction(Object):
    name: Named = Field("", validate_default=True)
    arguments: Any = None


class ToolCall(Object):
    id: Any = None
    function: CalledFunction = Field(default_factory=dict, validate_default=True)


class ChatMessage(Object):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(default_factory=list)
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)

    def for_template(self) -> dict:
        """Return the message in the chat template's form."""
        out: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        out["content"] = text_of(self.content)
        for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                out[name] = value
        if self.tool_calls:
            out["tool_calls"] = [
                tool_call(str(x.id or ""), x.function.name, x.function.arguments or "{}")
                for x in self.tool_calls
            ]
        return out


class Function(Object):
    name: ToolName = Field("", validate_default=True)


class FunctionTool(Object):
    function: Function


class Completion(Body):
    """Fields of chat and text completions, named as in OpenAI's API and mlx-lm's server."""

    fixed: ClassVar = frozenset(
        {"n", "best_of", "echo", "suffix", "functions", "modalities"}
        | {"adapters", "draft_model", "role_mapping"}
    )
    n: Annotated[Any, only(1)] = None
    best_of: Annotated[Any, only(1)] = None
    echo: Annotated[Any, only(False)] = None
    suffix: Annotated[Any, only("")] = None
    adapters: Annotated[Any, only()] = None
    draft_model: Annotated[Any, only()] = None
    role_mapping: Annotated[Any, only()] = None
    functions: Annotated[Any, only([])] = None
    modalities: Annotated[Any, only(["text"])] = None

    kv: str = ""
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    stop: Annotated[StopWords, BeforeValidator(lambda x: [x] if isinstance(x, str) else x)] = Field(
        default_factory=list
    )
    logit_bias: Biases = Field(default_factory=dict)
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None  # OpenAI's newer name
    user: Label = ""
    response_format: ResponseFormat | None = None
    top_k: Count = 0
    min_p: Annotated[float, between(0, 1)] = 0.0
    repetition_penalty: Annotated[float, AfterValidator(_penalty)] = 0.0
    repetition_context_size: Count = 20
    presence_penalty: Penalty = 0.0
    presence_context_size: Count = 20
    frequency_penalty: Penalty = 0.0
    frequency_context_size: Count = 20
    xtc_probability: Annotated[float, between(0, 1)] = 0.0
    xtc_threshold: Annotated[float, between(0, 0.5)] = 0.1
    seed: Annotated[int, between(-(1 << 63), (1 << 63) - 1)] | None = None

    def completion(self, model_info: ModelInfo, **more: Any) -> Request:
        """Build the request, like `request`. Raises Refused."""
        if self.kv and self.kv != model_info.kv:  # a batch has one kind of cache
            reason = f"this server's caches are {model_info.kv}; choose that, or start another"
            raise bad("kv", reason, self.kv)
        for token in self.logit_bias:
            known = token.isascii() and token.isdigit() and len(token) < 10
            if not known or int(token) >= model_info.vocabulary:
                reason = f"must name tokens by number, below {model_info.vocabulary}"
                raise bad("logit_bias", reason, token)
        return self.request(
            model_info,
            self.max_completion_tokens or self.max_tokens,
            form=self.response_format and self.response_format.form(),
            include_usage=self.stream_options.include_usage,
            stop=self.stop,
            logit_bias={int(token): float(x) for token, x in self.logit_bias.items()} or None,
            user=self.user,
            **more,
        )


class Chat(Completion):
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: ToolChoice = Choice()
    continue_final_message: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, between(-1, ALTERNATIVES)] = -1


class TextCompletion(Completion):
    prompt: Any = None
    logprobs: Annotated[int, PlainValidator(_alternatives)] = NO_LOGPROBS
    top_logprobs: Annotated[int, between(-1, ALTERNATIVES)] = -1


def read_chat(body: dict, model_info: ModelInfo) -> Request:
    """Parse the body of a chat completion. Raises Refused."""
    asked = Chat.read(body)
    messages = joined([message.for_template() for message in asked.messages])
    more = asked.continue_final_message
    if more and (len(messages) < 2 or messages[-1]["role"] != "assistant"):
        reason = "needs a last message of the assistant after others"
        raise bad("continue_final_message", reason, more)
    return asked.completion(
        model_info,
        chat=True,
        messages=messages,
        tools=body.get("tools"),  # unvalidated: templates may read more fields than are checked
        choice=asked.tool_choice,
        continue_final_message=more,
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
    )


def read_text(body: dict, model_info: ModelInfo) -> Request:
    """Parse the body of a text completion. Raises Refused."""
    asked = TextCompletion.read(body)
    prompt = _prompt(asked.prompt, model_info.vocabulary)
    has_logprobs = asked.logprobs != NO_LOGPROBS
    top = asked.logprobs if asked.logprobs > 0 else asked.top_logprobs
    return asked.completion(
        model_info, chat=False, prompt=prompt, logprobs=has_logprobs, top_logprobs=top
    )


def _prompt(prompt: Any, vocabulary: int) -> str | list[int]:
    """Return the prompt: a text or token ids, alone or as the only element of a list."""
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


# -- replies


@lru_cache(1)
def fingerprint() -> str:
    mlx = mx.__version__  # pyright: ignore[reportAttributeAccessIssue] mlx's stub lacks it
    return f"{mlx_lm.__version__}-{mlx}-{platform()}-{mx.device_info()['architecture']}"


class CompletionReply(Reply):
    """A completion, or its chunks."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._parts: list[tuple] = []
        self._logprobs: list[dict] = []
        self._calls, self._bytes, self._has_role = 0, b"", False

    def begin(self, prompt: Start) -> None:
        super().begin(prompt)
        chat = self.request.chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4()}",
            "system_fingerprint": fingerprint(),
            "object": f"{kind}.chunk" if chat and self.streams else kind,
            "model": self.model,
            "created": int(time.time()),
        }

    def add_parts(self, parts: list[tuple], token: Token) -> None:
        self._parts += parts
        if token.logprob is not None:
            self._logprobs.append(token.logprob)
        if self.streams and (parts or token.logprob is not None) and token.reason is None:
            self._send(None)

    def _send(self, reason: str | None, **more: Any) -> None:
        """Send a chunk. Only a chat's first chunk has the role: clients concatenate repeated ones."""
        if self.request.chat and not self._has_role:
            delta = {"role": "assistant", "content": ""}
            self.event(
                self._head | {"choices": [{"index": 0, "finish_reason": None, "delta": delta}]}
            )
            self._has_role = True
        self.event(self._chunk(reason) | more)

    def _chunk(self, reason: str | None) -> dict:
        """Return a chunk of the text since the last one."""
        texts = {kind: "".join(x[1] for x in self._parts if x[0] == kind) for kind in SPOKEN}
        calls = []
        for id, name, arguments in (part[1:] for part in self._parts if part[0] == "call"):
            function = {"name": name, "arguments": arguments}
            calls.append({"function": function, "type": "function", "id": id})
            if self.streams:
                calls[-1]["index"] = self._calls
                self._calls += 1
        choice = {"index": 0, "finish_reason": reason}
        if self._logprobs:
            choice["logprobs"] = self._logprobs_document()
        self._parts, self._logprobs = [], []
        if not self.request.chat:
            return self._head | {"choices": [choice | {"text": texts["text"]}]}
        message: dict = {}
        if not self.streams:
            message = {"role": "assistant", "content": texts["text"] or (None if calls else "")}
        elif texts["text"]:
            message["content"] = texts["text"]
        if texts["thinking"]:
            message["reasoning"] = texts["thinking"]
        if calls:
            message["tool_calls"] = calls
        name = "delta" if self.streams else "message"
        return self._head | {"choices": [choice | {name: message}]}

    def _logprobs_document(self) -> dict:
        steps = self._logprobs
        if self.request.chat:
            return {"content": steps}
        offsets = []
        for step in steps:
            offsets.append(len(self._bytes.decode(errors="ignore")))
            self._bytes += bytes(step["bytes"])
        tops = [{one["token"]: one["logprob"] for one in step["top_logprobs"]} for step in steps]
        return {
            "tokens": [step["token"] for step in steps],
            "token_logprobs": [step["logprob"] for step in steps],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }

    def close(self, kv: dict, stop_word: str | None) -> None:
        super().close(kv, stop_word)
        if not self.streams:
            return
        self._send(self.reason, kv=self.kv)
        if self.request.include_usage:
            self.event(self._head | {"choices": []} | self._usage() | {"kv": self.kv})
        self._buffer += b"data: [DONE]\n\n"

    def document(self) -> dict:
        return self._chunk(self.reason) | self._usage() | {"kv": self.kv}

    def _usage(self) -> dict:
        prompt, cached = self.prompt.prompt_tokens, self.prompt.cached_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": self.count}
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"usage": counts | {"total_tokens": prompt + self.count} | details}

    def error_event(self, refused: Refused) -> bytes:
        return event(refused.body())
