"""A request that is served alone, outside of batches, whose client may leave."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from threading import Event

from mlx_lm import server

from mlxkv.errors import MachineError
from mlxkv.serve.ranks import Ranks
from mlxkv.serve.refusals import Refused

ENDING = 2  # says more than that the client has left


class Alone:
    """Its line. mlx-lm looks up between the tokens of a reply; here also between the parts of a prompt,
    which is read no further when nobody waits for it, and when the server ends. One process alone may
    know of either: all agree. given_up: whether it is known that nobody waits. fault: what ended it,
    where that was the machine."""

    def __init__(self, line: Queue, given_up: Callable[[], bool], ranks: Ranks):
        self._line, self._given_up, self._ranks = line, given_up, ranks
        self._context: server.GenerationContext | None = None
        self._stopped = Event()
        self.fault: Exception | None = None

    def put(self, item) -> None:
        if isinstance(item, server.GenerationContext):
            self._context = item
            item.stop = self._stopped.set  # called by the thread that serves the client
        reading = isinstance(item, tuple)  # tokens of the prompt so far
        if reading or isinstance(item, server.Response):
            self._look_up(reading)
        fault = isinstance(item, Exception) and not isinstance(item, Refused)
        if fault and type(item) in (RuntimeError, MachineError):  # as MLX raises it, and mlxkv
            self.fault = item
        self._line.put(item)
        if fault and self._context is not None and self._ranks.many:
            raise item  # mlx-lm would go on with the next request, out of step with the others

    def _look_up(self, reading: bool) -> None:
        gone = self._stopped.is_set() or self._given_up()
        found = self._ranks.most(ENDING if self._ranks.ending else gone)
        if found == ENDING:  # a reply that just stopped would pass for a whole one
            raise Refused(503, "[serve] is ending", "ending")
        if found and (reading or self._ranks.many):  # of many mlx-lm cannot stop a reply
            raise Refused(504, "[serve] given up under way", "timeout")
        if found:
            self._context._should_stop = True  # and what was written is kept
