"""A request that mlx-lm serves alone, outside of batches."""

from __future__ import annotations

from queue import Queue
from threading import Event

from mlx_lm import server

from mlxkv.errors import MachineError
from mlxkv.serve.job import Job
from mlxkv.serve.ranks import Ranks
from mlxkv.serve.refusals import Refused, ending

EVERY = 16  # tokens between two agreements of several processes: each waits for the step under way
ENDING = 2  # beside 0 and 1 for a client that is there or has left


class Alone:
    """Stands where mlx-lm puts what it sends to the client.

    mlx-lm asks between the tokens of a reply whether the client has left. This asks between the parts
    of a prompt, too, and whether the server is ending; processes agree on it, as one alone may know, at
    one token in `EVERY`.
    fault: the machine's error that ended the request, or None.
    """

    def __init__(self, line: Queue, job: Job, ranks: Ranks):
        self._line, self._job, self._ranks = line, job, ranks
        self._context: server.GenerationContext | None = None
        self._caches: list = []
        self._stopped, self._tokens = Event(), 0
        self.fault: Exception | None = None

    def generate(self, **asked):
        """mlx-lm's `stream_generate`; its caches are measured when the reply ends."""
        self._caches = asked["prompt_cache"]
        return server.stream_generate(**asked)

    def put(self, item) -> None:
        if isinstance(item, server.GenerationContext):
            self._context = item
            item.stop = self._stopped.set  # called by the thread that serves the client
        reading = isinstance(item, tuple)  # counts of the prompt's tokens
        if reading or (isinstance(item, server.Response) and self._turn()):
            self._look_up(reading)
        if isinstance(item, server.Response) and item.finish_reason is not None:
            self._job.measured(
                self._caches, max((cache.size() for cache in self._caches), default=0)
            )
        fault = isinstance(item, Exception) and not isinstance(item, Refused)
        if fault and type(item) in (RuntimeError, MachineError):  # raised by MLX, and by mlxkv
            self.fault = item
        self._line.put(item)
        if fault and self._context is not None and self._ranks.many:
            raise item  # mlx-lm would go on with the next request, out of step with the others

    def _turn(self) -> bool:
        """Return whether this token is one at which to look up; all processes count the same."""
        self._ranks.hear()
        self._tokens += 1
        return not self._ranks.many or self._tokens % EVERY == 1

    def _look_up(self, reading: bool) -> None:
        """Raises Refused, or stops the reply, where nobody waits for it or the server is ending."""
        gone = self._stopped.is_set() or self._job.given_up
        found = self._ranks.most(ENDING if self._ranks.ending else gone)
        if found == ENDING:  # if it just stopped, half of a reply would pass for a whole one
            raise ending()
        if found and (
            reading or self._ranks.many
        ):  # mlx-lm cannot stop a reply of several processes
            raise Refused(504, "[serve] given up under way", "timeout")
        if found:
            self._context._should_stop = True  # the caches of what was written are kept
