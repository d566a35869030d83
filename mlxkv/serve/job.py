"""One request in the engine, and what the generation thread tells whoever waits for its reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from queue import Queue
from typing import Any

from mlx_lm import server

from mlxkv.models.replies.stops import ReplyText
from mlxkv.models.usage import Usage, usage
from mlxkv.serve.http.request import Request

LEAST = -9999.0  # the log-probability of what cannot come, as OpenAI writes it


def finite(logprob: float) -> float | None:
    """A log-probability that JSON has: minus infinity is `LEAST`, what is no number null."""
    return max(logprob, LEAST) if isfinite(logprob) or logprob < 0 else None


@dataclass
class Started:
    """A request whose prompt is read now.

    context: mlx-lm's, with tokens of the prompt.
    """

    context: server.GenerationContext

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.context.prompt)

    @property
    def cached(self) -> int:
        """Tokens of it that a cache held."""
        return max(0, self.context.prompt_cache_count)  # -1 before the cache was looked for


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

    asked: the request, None in processes without clients. given_up: nobody waits for the reply. line: gets `Started`,
    (read, all) tokens of the prompt, each `Token`, and None at the end; or an error. tenant: whose prompt cache it
    uses. thinks: whether its reply begins with thinking. text: of its reply, where it is not all that mlx-lm decodes:
    up to a stop word, behind a start that was given. tokens, usage: of its caches at the end.
    piece: the text of a token.
    """

    asked: Request | None = None
    given_up: bool = False
    tenant: str = ""
    thinks: bool = False
    line: Any = field(default_factory=Queue, repr=False)
    tokens: int = 0
    usage: Usage | None = None
    text: ReplyText | None = None
    _context: server.GenerationContext | None = None
    piece: Callable[[int], str] = str

    def put(self, item: Any) -> None:
        """Send what mlx-lm's loop says to the client."""
        if isinstance(item, server.GenerationContext):
            self._context, item = item, Started(item)
        elif isinstance(item, server.Response):
            if self.text is not None:
                item.text, item.finish_reason = self.text.take(item.finish_reason)
            item = Token(item.text, item.finish_reason, self._logprob(item))
        self.line.put(item)

    def _logprob(self, item: server.Response) -> dict | None:
        if self.asked is None or not self.asked.logprobs:
            return None
        best = sorted(item.top_tokens, key=lambda one: -one["logprob"])
        pairs = [(item.token, item.logprob), *((one["id"], one["logprob"]) for one in best)]
        entries = []
        for token, logprob in pairs:
            text = self.piece(token)
            whole = None if "\ufffd" in text else list(text.encode())
            entries.append({"id": token, "token": text, "logprob": finite(logprob), "bytes": whole})
        return entries[0] | {"top_logprobs": entries[1:]}

    @property
    def stop_word(self) -> str | None:
        """The stop word that ended the reply, or None."""
        return self.text.word if self.text is not None else None

    def leave(self) -> None:
        """Note that nobody waits any more. For any thread."""
        self.given_up = True
        self.stop()

    def stop(self) -> None:
        """End the reply, if there is one."""
        if self._context is not None:
            self._context.stop()

    def measured(self, caches: list, tokens: int) -> None:
        """Note the size of the caches, which hold so many tokens."""
        self.usage, self.tokens = usage(caches), tokens


class Aside:
    """A function that the generation thread calls for another one. line: gets what it returns or raises."""

    def __init__(self, ask: Callable[[], Any]):
        self._ask, self.line = ask, Queue()

    def answer(self) -> None:
        try:
            self.line.put(self._ask())
        except Exception as error:  # for whoever asked
            self.line.put(error)


@dataclass
class Arguments(server.GenerationArguments):
    """mlx-lm hands these on wherever it deals with a request: with its job, whether its last message is
    the start of the reply, the grammar that the reply follows, and whether it may be shorter than asked for."""

    job: Job
    continues: bool = False
    grammar: str | None = None
    shorten: bool = False
