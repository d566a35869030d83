"""One request in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import Queue

from mlx_lm import server

from mlxkv.models.usage import Usage, usage


@dataclass(eq=False)
class Job:
    """What the thread of a client and the generation thread tell each other beside mlx-lm's messages.

    given_up: the client has left, or its time is over; told by its thread. line: the queue of those
    messages. tenant: whose prompt cache it uses. tokens, usage: of its caches at the end, told by the
    generation thread.
    """

    given_up: bool = False
    tenant: str = ""
    line: Queue = field(default_factory=Queue, repr=False)
    tokens: int = 0
    usage: Usage | None = None

    def measured(self, caches: list, tokens: int) -> None:
        """Note the size of the caches, which hold so many tokens."""
        self.usage, self.tokens = usage(caches), tokens

    def drop(self) -> None:
        """Stop the replies that wait in the line, which nobody reads."""
        while not self.line.empty():
            getattr(self.line.get_nowait(), "stop", lambda: None)()


@dataclass
class Arguments(server.GenerationArguments):
    """mlx-lm hands these on wherever it deals with a request: with its job, and whether its last message is
    the start of the reply."""

    job: Job
    continues: bool = False
