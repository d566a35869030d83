"""A request that is served alone, outside of batches, whose client may leave."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue

from mlx_lm import server

from mlxkv.serve.refusals import Refused


class Alone:
    """Its line. mlx-lm looks up between the tokens of a reply; here also between the parts of a prompt,
    which is read no further when nobody waits for it. given_up: whether that is known."""

    def __init__(self, line: Queue, given_up: Callable[[], bool]):
        self._line, self._given_up = line, given_up
        self._context: server.GenerationContext | None = None

    def put(self, item) -> None:
        if isinstance(item, server.GenerationContext):
            self._context = item
        stopped = self._context is not None and self._context._should_stop
        if isinstance(item, tuple) and (stopped or self._given_up()):  # tokens of the prompt so far
            raise Refused(504, "[serve] given up while its prompt was read", "timeout")
        self._line.put(item)
