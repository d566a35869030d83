"""A request that is served alone, outside of batches, whose client may leave."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from threading import Event

from mlx_lm import server

from mlxkv.serve.ranks import Ranks
from mlxkv.serve.refusals import Refused


class Alone:
    """Its line. mlx-lm looks up between the tokens of a reply; here also between the parts of a prompt,
    which is read no further when nobody waits for it. With several processes rank 0 alone would see
    that: all ask it. given_up: whether that is known."""

    def __init__(self, line: Queue, given_up: Callable[[], bool], ranks: Ranks):
        self._line, self._given_up, self._ranks = line, given_up, ranks
        self._context: server.GenerationContext | None = None
        self._stopped = Event()

    def put(self, item) -> None:
        if isinstance(item, server.GenerationContext):
            self._context = item
            item.stop = self._stopped.set  # called by the thread that serves the client
        gone = self._stopped.is_set() or self._given_up()
        if isinstance(item, tuple | server.Response) and self._ranks.most(gone):
            if isinstance(item, tuple):  # tokens of the prompt so far
                raise Refused(504, "[serve] given up while its prompt was read", "timeout")
            self._context._should_stop = True  # one of several processes keeps no part of a session
        self._line.put(item)
