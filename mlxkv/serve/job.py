"""One request in the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

from mlx_lm import server

from mlxkv.models.replies.stops import ReplyText
from mlxkv.models.usage import Usage, usage


@dataclass(eq=False)
class Job:
    """What the thread of a client and the generation thread tell each other beside mlx-lm's messages.

    given_up: the client has left, or its time is over; told by its thread. line: the queue of those
    messages. tenant: whose prompt cache it uses. thinks: whether its reply begins with thinking. text: of its
    reply, where it is not all that mlx-lm decodes: up to a stop word, behind a start that was given. tokens,
    usage: of its caches at the end, told by the generation thread.
    """

    given_up: bool = False
    tenant: str = ""
    thinks: bool = False
    line: Queue = field(default_factory=Queue, repr=False)
    tokens: int = 0
    usage: Usage | None = None
    text: ReplyText | None = None

    def put(self, item: Any) -> None:
        """Send what mlx-lm's loop says to the client."""
        if self.text is not None and isinstance(item, server.Response):
            item.text, item.finish_reason = self.text.take(item.finish_reason)
        self.line.put(item)

    def measured(self, caches: list, tokens: int) -> None:
        """Note the size of the caches, which hold so many tokens."""
        self.usage, self.tokens = usage(caches), tokens

    def drop(self) -> None:
        """Stop the replies that wait in the line, which nobody reads."""
        while not self.line.empty():
            getattr(self.line.get_nowait(), "stop", lambda: None)()


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
