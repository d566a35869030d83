"""One model over several processes (mlx.launch), each with its share of the kv heads.

Rank 0 alone has clients. All go through the same steps in the same order: what depends on a clock, a
socket, a thread, a template or on bytes of this machine is told by one process to all, or agreed on;
what follows from things told (which request fits, which session is found, who is evicted) each works
out for itself. All methods, but those of the end, are for the generation thread: what it asks here,
that of every other process has to ask, too.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

import mlx.core as mx

from mlxkv import __version__
from mlxkv.console import note
from mlxkv.errors import MachineError

T = TypeVar("T")
PATIENCE = 30.0  # seconds that a part of a prompt may take, in which nothing is heard


class Ranks:
    """This process among its group; with one process, every method does nothing more than it must.

    many: whether there are others. group: None without them. heard: when all were last in step.
    ending: whether somebody has asked this process to end. ended: whether all know that of one.
    """

    def __init__(self):
        group = mx.distributed.init()
        self.rank, self.size = group.rank(), group.size()
        self.many = self.size > 1
        self.group = group if self.many else None
        self.ending = self.ended = False
        self.heard = time.monotonic()

    def share(self, thing: T) -> T:
        """Rank 0's `thing`, which can be pickled."""
        if not self.many:
            return thing
        data = pickle.dumps(thing) if self.rank == 0 else b""
        size, ending = mx.distributed.all_sum(mx.array([len(data), self.ending])).tolist()
        self.ended = self.ended or ending > 0
        own = mx.array(data) if data else mx.zeros(size, mx.uint8)
        told = bytes(memoryview(mx.distributed.all_sum(own)))
        self.heard = time.monotonic()
        return thing if self.rank == 0 else pickle.loads(told)

    def decide(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, on rank 0: the others do not run it."""
        if not self.many:
            return work()
        found, error = None, None
        if self.rank == 0:
            try:
                found = work()
            except Exception as raised:
                error = raised
        found, error = self.share((found, error))
        if error is not None:
            raise error
        return found

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns in each process; what it raises in one is the end of all."""
        made, error = None, None
        try:
            made = make()
        except Exception as raised:
            error = raised
        fine = self.least(error is None)
        if error is not None:
            raise error
        if not fine:
            raise MachineError("[serve] another process could not begin, and says why")
        return made

    def most(self, number: int) -> int:
        """The largest of all processes' numbers."""
        return max(self._all(number))

    def least(self, number: int) -> int:
        return min(self._all(number))

    def _all(self, number: int) -> list[int]:
        if not self.many:
            return [number]
        found = mx.distributed.all_gather(mx.array([number], mx.int64)).tolist()
        self.heard = time.monotonic()
        return found

    def tokens(self, drawn: mx.array) -> mx.array:
        """Rank 0's tokens: logits of unlike machines differ in the last bit. drawn: [B]."""
        if not self.many:
            return drawn
        return mx.distributed.all_sum(drawn if self.rank == 0 else mx.zeros_like(drawn))

    def step(self, batch) -> None:
        """After each step of a batch: the tokens that come next are those of rank 0."""
        self.heard = time.monotonic()
        if self.many and batch.uids:
            batch._next_tokens = self.tokens(batch._next_tokens)
            mx.async_eval(batch._next_tokens)

    def end(self) -> None:
        """From any thread: all processes are to end, which they do at the same point of their work."""
        self.ending, self.heard = True, time.monotonic()

    def watch(self, seconds: float) -> None:
        """For the main thread: end this process, when for so long nothing came from the others: one may
        be lost, and not every backend says so at every time. No longer than it must be, once the end
        was asked for."""
        limit = PATIENCE if self.ending else max(seconds, PATIENCE)
        if self.many and time.monotonic() - self.heard > limit:
            note(
                f"[serve] nothing came from the other processes for {limit:g} s; this one ends alone"
            )
            os._exit(1)  # a thread waits for them in MLX, which nothing interrupts

    def start(self, load: Callable[[], str]) -> None:
        """Load the model, here and elsewhere. load: returns what tells it from others. Raises what that
        raised, and MachineError where it raised, or returned something else, in another process."""
        if not self.many:
            load()
            return
        error, mark = None, None
        try:
            mark = load(), __version__, version("mlx-lm"), version("mlx")
        except Exception as raised:
            error = raised
        told = self.share(mark)
        fine = self.least(error is None and mark == told)
        if error is not None:
            raise error
        if not fine:
            raise MachineError(
                "[serve] another process could not load the model, and says why, or has another model "
                f"or other versions than rank 0; got {mark} in rank {self.rank}"
            )

    def sampler(self, make: Callable) -> Callable:
        """mlx-lm's maker of samplers, whose tokens are then those of rank 0."""

        def made(*args):
            draw = make(*args)
            return lambda logprobs: self.tokens(draw(logprobs))

        return made if self.many else make


def follow(ranks: Ranks) -> None:
    """Signals of a process other than rank 0: Ctrl-C reaches rank 0, too; SIGTERM ends all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: ranks.end())
