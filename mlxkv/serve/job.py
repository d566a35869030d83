"""One request in the engine, and events from the generation thread to the handler that waits."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from queue import Queue
from typing import Any, NamedTuple

import mlx.core as mx

from mlxkv.models.replies.stops import ReplyText
from mlxkv.models.usage import Usage
from mlxkv.serve.grammar import Constraint
from mlxkv.serve.http.request import Request

# Fields of requests that no process but rank 0 needs.
LOCAL_FIELDS = ("prompt", "messages", "tools", "chat_template_kwargs", "user", "cache_salt")


class Prompt(NamedTuple):
    """The tokens of a request.

    segments: the same, cut behind the system's words and before a tail of thinking: whose caches are kept.
    state: in which the reply begins, "normal" or "reasoning".
    """

    tokens: list[int]
    segments: list[list[int]]
    state: str = "normal"


@dataclass(frozen=True)
class Start:
    """A request whose prompt is read now. prompt_tokens, cached_tokens: of the prompt, and those of them that a cache
    held. markup: `apis.reply.Markup` for the reply."""

    prompt_tokens: int
    cached_tokens: int
    markup: Any


@dataclass(frozen=True)
class Token:
    """A token of a reply. text: what may be sent now. reason: why the reply ends with it, or None. logprob: its
    entry in OpenAI's log-probabilities, where they were asked for."""

    text: str
    reason: str | None = None
    logprob: dict | None = None


@dataclass(eq=False)
class Job:
    """What the event loop and the generation thread tell each other.

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
        """Return a request without its text, its tokens and its tenant."""
        request = asdict(self.request)
        fields = {k: x for k, x in request.items() if k not in LOCAL_FIELDS}
        return [fields, self.prompt, self.tenant]

    @classmethod
    def from_json(cls, request: dict, prompt: list, tenant: str) -> Job:
        if bias := request["logit_bias"]:  # keys of JSON are texts
            request["logit_bias"] = {int(token): value for token, value in bias.items()}
        return cls(Request(**request), Prompt(*prompt), tenant)

    def put(self, item: Any) -> None:
        self.channel.put(item)

    def note_logits(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Keep logits [1, V], and return them: a processor of mlx-lm, which comes last."""
        self.logits.append(logits[0])
        return logits
