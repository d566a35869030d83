"""One request in the engine, and what the generation thread tells whoever waits for its reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

from mlxkv.models.replies.stops import ReplyText
from mlxkv.models.usage import Usage, usage
from mlxkv.serve.http.request import Request


@dataclass(frozen=True)
class Started:
    """A request whose prompt is read now.

    prompt: its tokens. cached: those of them that a cache held. machine: mlx-lm's, which knows marks of thoughts and of
    calls in the reply. state: of it, in which the reply begins. parse: reads the text of calls, or None.
    """

    prompt: int
    cached: int
    machine: Any
    state: str
    parse: Callable | None


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

    asked: the request. tenant: whose prompt cache it uses. given_up: nobody waits for the reply. line: gets `Started`,
    (read, all) tokens of the prompt, each `Token`, and None at the end; or an error.
    text: of the reply. kinds: of the segments of its prompt that are not read yet, the last first. cached, held:
    tokens that a cache held, that its caches hold. tokens, usage: of its caches at the end.
    """

    asked: Request
    tenant: str = ""
    given_up: bool = False
    line: Any = field(default_factory=Queue, repr=False)
    text: ReplyText | None = None
    kinds: list[str] = field(default_factory=list)
    cached: int = 0
    held: int = 0
    tokens: int = 0
    usage: Usage | None = None

    def put(self, item: Any) -> None:
        self.line.put(item)

    @property
    def stop_word(self) -> str | None:
        """The stop word that ended the reply, or None."""
        return self.text.word if self.text is not None else None

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
