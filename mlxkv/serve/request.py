"""A request from an API to the batch: its fields, its prompt, and its job for the generation thread."""

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
    """Fields are named as in OpenAI's API and mlx-lm's server.

    chat: whether to answer `messages` (with `tools`, `chat_template_kwargs`) or to continue `prompt`, a text or its
    tokens. max_tokens: longest reply. shorten: whether to shorten the reply if memory is short.
    continue_final_message: whether the last message is the start of the reply (as in vLLM and transformers).
    include_usage: whether a stream ends with counts. top_logprobs: -1 for none. user, cache_salt: separate the caches
    of one API key. grammar: llguidance's grammar of the reply, or None. repetition_penalty: 0 for none. custom_tools:
    names of tools that take free text. echo: fields repeated in the reply. pack: name of the one that it begins behind,
    which the reply calls its model.
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
    pack: str = ""
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
    """What requests are checked against. Counts are in tokens.

    kv: the preset. longest: longest reply. max_tokens: longest reply of a request without a limit. vocabulary: its
    size. calls: marks of tool calls. sampling: the makers' defaults. context: None if unknown. compiles: whether
    schemas may be compiled in this process.
    """

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

    segments: the same, split after the system message and before a tail of thinking: their caches are stored.
    state: the reply's initial state, "normal" or "reasoning".
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
    """A token of a reply. text: what can be sent now. reason: the finish reason if it is the last, else None. logprob:
    its entry in OpenAI's log-probabilities, if requested."""

    text: str
    reason: str | None = None
    logprob: dict | None = None


@dataclass(eq=False)
class Job:
    """A request's state, shared by the event loop and the generation thread.

    dropped: number of messages dropped to fit the context. is_operator: whether its client may see other clients'
    load. constraint: enforces the grammar, if there is one. cancelled: whether the client has left. is_reading: whether
    the prefill is unfinished. channel: receives `Start`, prefill progress (done, total), each `Token`, and None at the
    end; or an error. text: set when the request begins. logits: of the next tokens, if log-probabilities were
    requested: mlx-lm's are rounded to 16 bits. cached_tokens: tokens of the prompt found in a cache. cache_tokens:
    tokens in its caches now. tokens, usage: totals of its caches, set at the end.
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
        """Store and return logits [1, V]: a logits processor of mlx-lm, the last one."""
        self.logits.append(logits[0])
        return logits
