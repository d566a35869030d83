"""A request on its way from an API to the batch: its fields, its prompt, and the generation thread's job."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from queue import Queue
from typing import Any, NamedTuple

import mlx.core as mx

from mlxkv.generate.stops import ReplyText
from mlxkv.generate.usage import Usage
from mlxkv.loading.sampling import Sampling
from mlxkv.serve.grammar import Calls, Constraint
from mlxkv.serve.refusals import Refused

DEFAULT_NAMES = ("default", "default_model")


@dataclass(frozen=True)
class Request:
    """Fields have the names of OpenAI's API and of mlx-lm's server.

    chat: whether `messages` (with `tools`, `chat_template_kwargs`) are to be answered, or `prompt` to
    be continued, a text or its tokens. max_tokens: of the longest reply. shorten: whether the reply may be shorter
    where memory has no room for it. continue_final_message: the last message is the start of the reply, which
    goes on (as in vLLM and transformers). include_usage: whether a stream ends with counts. top_logprobs: -1 for
    none. user, cache_salt: whose caches are used, within an API key. grammar: llguidance's, which the reply follows,
    or None. repetition_penalty: 0 for none. custom_tools: names of those whose argument is a free text. echo: fields
    that the reply repeats.
    """

    chat: bool
    max_tokens: int
    stream: bool = False
    include_usage: bool = False
    shorten: bool = False
    prompt: str | list[int] = ""
    messages: list[dict] = field(default_factory=list)
    tools: list[dict] | None = None
    chat_template_kwargs: dict | None = None
    continue_final_message: bool = False
    grammar: str | None = None
    custom_tools: frozenset[str] = frozenset()
    echo: dict = field(default_factory=dict)
    user: str = ""
    cache_salt: str = ""
    stop: list[str] = field(default_factory=list)
    logprobs: bool = False
    top_logprobs: int = -1
    logit_bias: dict[int, float] | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None


# Request fields needed only by rank 0.
LOCAL_FIELDS = (
    *("prompt", "messages", "tools", "chat_template_kwargs", "custom_tools", "echo"),
    *("user", "cache_salt"),
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
    sampling: Sampling = field(default_factory=Sampling)
    context: int | None = None
    compiles: bool = True


def no_model(name: str, names: tuple[str, ...]) -> Refused:
    """Return the error for an unknown model."""
    choices = " or ".join(map(repr, names))
    return Refused(404, f"[model] no such model; got {name!r}; choose {choices}", "model_not_found")


class Prompt(NamedTuple):
    """The tokens of a request.

    segments: the same, cut behind the system's words and before a tail of thinking: whose caches are kept.
    state: in which the reply begins, "normal" or "reasoning".
    """

    tokens: list[int]
    segments: list[list[int]]
    state: str = "normal"


class Read(NamedTuple):
    """A parsed request. dropped: number of messages dropped to fit the context."""

    request: Request
    prompt: Prompt
    dropped: int = 0


@dataclass(frozen=True)
class Start:
    """The start of a prefill. prompt_tokens: length of the prompt. cached_tokens: tokens of it found in a
    cache."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Token:
    """A token of a reply. text: what may be sent now. reason: why the reply ends with it, or None. logprob: its
    entry in OpenAI's log-probabilities, where they were asked for."""

    text: str
    reason: str | None = None
    logprob: dict | None = None


@dataclass(eq=False)
class Job:
    """A request's state, shared by the event loop and the generation thread.

    tenant: whose prompt cache it uses. is_operator: whether its client may know what others ask. constraint: makes the
    reply follow the request's grammar, where it has one. cancelled: nobody waits for the reply. channel: gets `Start`,
    numbers of tokens of the prompt (read, all), each `Token`, and None at the end; or an error.
    dropped: messages of the chat that the context had no room for. is_reading: whether its prompt is not read yet.
    logits: of the tokens that come next, where probabilities were asked for: mlx-lm's have the rounding of 16 bits.
    text: there once it has begun. cached_tokens: of its prompt, found in a cache. cache_tokens: in its caches now.
    tokens, usage: of its caches; there at the end.
    """

    request: Request
    prompt: Prompt
    tenant: str = ""
    dropped: int = 0
    is_operator: bool = True
    constraint: Constraint | None = None
    cancelled: bool = False
    is_reading: bool = True
    channel: Any = field(default_factory=Queue, repr=False)
    text: ReplyText = field(init=False, repr=False)
    logits: deque[mx.array] = field(default_factory=deque, repr=False)
    cached_tokens: int = 0
    cache_tokens: int = 0
    tokens: int = 0
    usage: Usage = field(init=False, repr=False)

    def to_json(self) -> list:
        """Return the request as JSON values, without text, tokens and tenant."""
        request = asdict(self.request)
        fields = {k: x for k, x in request.items() if k not in LOCAL_FIELDS}
        return [fields, self.prompt, self.tenant]

    @classmethod
    def from_json(cls, request: dict, prompt: list, tenant: str) -> Job:
        """Rebuild a request written by `to_json`."""
        if bias := request["logit_bias"]:  # JSON keys are strings
            request["logit_bias"] = {int(token): value for token, value in bias.items()}
        return cls(Request(**request), Prompt(*prompt), tenant)

    def put(self, item: Any) -> None:
        self.channel.put(item)

    def note_logits(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Keep logits [1, V], and return them: a processor of mlx-lm, which comes last."""
        self.logits.append(logits[0])
        return logits
