"""One model in several processes of `mlx.launch`: all make the same steps.

Rank 0 has the clients. It decides, or all agree on, whatever depends on a clock, a socket, a thread, a template or the
bytes of one machine; each process derives the rest (which request fits, which session is found, which is evicted).
What it tells is JSON, which runs no code.

Collective: `share`, `together`, `most`, `least`, `tokens`, `step` and `start` are for the
generation thread, and every process has to make the same calls.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar, cast

import mlx.core as mx

from mlxkv import __version__
from mlxkv.console import note
from mlxkv.errors import MachineError
from mlxkv.patching import mlx_lm_compat

T = TypeVar("T")
SHORT = 248  # bytes of JSON that travel with their length; longer ones take a second sum
_HEAD = 8  # bytes: the length in 7 of them, how many processes were asked to end
MOST = 256 << 20  # bytes that rank 0 may tell at once: a prompt of millions of tokens
PATIENCE = 30.0  # seconds for a part of a prompt, during which processes do not meet


class Ranks:
    """This process in its group, which may be the only one.

    many: whether there are others. group: None without them. heard: when all were last in step, by
    `time.monotonic`. ending: whether this process was asked to end. ended: whether all know that one was.
    """

    def __init__(self):
        # NCCL registers the buffers of every sum in a CUDA graph, anew for each step: over hundreds of them a
        # step becomes several times as long (docs/internals/kernels.md). Read when NCCL begins.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        group = mx.distributed.init()
        self.rank, self.size = group.rank(), group.size()
        self.many = self.size > 1
        self.group = group if self.many else None
        self.ending = self.ended = False
        self.heard = time.monotonic()

    def share(self, thing: T) -> T:
        """Return rank 0's `thing`, which JSON has to give back as it is. Raises MachineError if it is too long."""
        if not self.many:
            return thing
        # Reading a sum waits for all that the device was given before it: one sum, where the thing is short.
        data = json.dumps(thing, allow_nan=False).encode() if self.rank == 0 else b""
        head = len(data).to_bytes(_HEAD - 1, "little") + bytes([self.ending])
        received = _summed(head + data[:SHORT].ljust(SHORT, b"\0"))
        size = int.from_bytes(received[: _HEAD - 1], "little")
        self.ended = self.ended or received[_HEAD - 1] > 0
        if not 0 < size <= MOST:  # before anything is allocated
            raise MachineError(f"[serve] rank 0 tells {size} bytes at once; at most {MOST}")
        received = received[_HEAD:][:size]
        if size > SHORT:
            received += _summed(data[SHORT:] or bytes(size - SHORT))
        self.hear()
        return thing if self.rank == 0 else json.loads(received)

    def run_on_all(self, make: Callable[[], T]) -> T:
        """Run `make` in each process and return its own result. Where it raises in one, all raise."""
        results: list[T] = []
        error = None
        try:
            results.append(make())
        except Exception as raised:
            error = raised
        if self.all_min(error is None):
            return results[0]
        raise error or MachineError("[serve] another process could not begin, and says why")

    def all_max(self, number: int) -> int:
        """Return the largest of all processes' numbers."""
        return max(self._all(number))

    def all_min(self, number: int) -> int:
        """Return the smallest of all processes' numbers."""
        return min(self._all(number))

    def _all(self, number: int) -> list[int]:
        if not self.many:
            return [number]
        numbers = mx.distributed.all_gather(mx.array([number], mx.int64))
        out = cast(list[int], numbers.tolist())
        self.hear()
        return out

    def tokens(self, drawn: mx.array) -> mx.array:
        """Return rank 0's tokens [B]: logits of different machines differ in the last bit."""
        if not self.many:
            return drawn
        # Zeros that come of what was drawn: MLX would sum others before the model's sums, or without them.
        return mx.distributed.all_sum(drawn if self.rank == 0 else drawn * 0)

    def hear(self) -> None:
        """Note that all are in step: a token came that every one of them had a part in."""
        self.heard = time.monotonic()

    def step(self, batch) -> None:
        """Replace the next tokens of a batch by rank 0's, after each of its steps."""
        self.hear()
        if self.many and batch.uids:
            drawn = self.tokens(mlx_lm_compat.next_tokens(batch))
            mlx_lm_compat.set_next_tokens(batch, drawn)
            mx.async_eval(drawn)

    def end(self) -> None:
        """Ask all processes to end, which they do at the same step. Safe from any thread."""
        self.ending, self.heard = True, time.monotonic()

    def watch(self, seconds: float) -> None:
        """End this process when the others were silent for so long: not every backend tells when one is
        lost. Once the end was asked for, `PATIENCE` is enough. For the main thread."""
        limit = PATIENCE if self.ending else max(seconds, PATIENCE)
        if self.many and time.monotonic() - self.heard > limit:
            note(
                f"[serve] nothing came from the other processes for {limit:.15g} s; this one ends alone"
            )
            os._exit(1)  # a thread waits for them in MLX, which nothing interrupts

    def start(self, load: Callable[[], str]) -> None:
        """Load the model in all processes. load: returns the model's fingerprint. Raises what `load` raises,
        and MachineError if it raised, or returned another fingerprint, in another process."""
        mark = [self.run_on_all(load), __version__, version("mlx-lm"), version("mlx")]
        if not self.all_min(self.share(mark) == mark):
            raise MachineError(
                "[serve] another process has another model or other versions than rank 0; "
                f"got {mark} in rank {self.rank}"
            )


def _summed(data: bytes) -> bytes:
    """Return the sum of all processes' bytes, place by place."""
    # mlx's stub knows neither arrays of bytes nor bytes of arrays.
    total = mx.distributed.all_sum(mx.array(data))  # pyright: ignore[reportArgumentType]
    return bytes(memoryview(total))  # pyright: ignore[reportArgumentType]
