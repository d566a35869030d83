"""One model in several processes of `mlx.launch`, which run the same steps.

Rank 0 serves the clients. Anything that depends on a clock, a socket, a thread, a template or one machine's memory is
decided by rank 0 or agreed by all; each process derives the rest (which request fits, which session is found, which is
evicted). Rank 0 sends JSON, so that receiving runs no code. `share`, `run_on_all`, `all_max`, `all_min`, `tokens`,
`step` and `start` are collective: for the generation thread, and every process must make the same calls.
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
SHORT = 248  # bytes of JSON sent together with their length; longer ones need a second sum
_HEAD = 8  # bytes: the length in 7 of them, how many processes were asked to end
MOST = 256 << 20  # maximum bytes per message of rank 0: a prompt of millions of tokens
PATIENCE = 30.0  # seconds for a prefill chunk, during which processes do not meet


class Ranks:
    """This process and its group, possibly of one.

    many: whether there are other processes. group: None without them. heard: `time.monotonic()` when all were last in
    step. ending: whether this process was asked to end. ended: whether all processes know that one was.
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
        """Return rank 0's `thing`, which must survive a JSON round trip. Raises MachineError if it is too long."""
        if not self.many:
            return thing
        # Reading a sum waits for all work queued before it on the device: short messages use a single sum.
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
        """Run `make` in each process and return the local result. If it raises in one process, all raise."""
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
        # Zeros computed from `drawn` keep the order of collectives: MLX could run
        # independent ones before the model's sums.
        return mx.distributed.all_sum(drawn if self.rank == 0 else drawn * 0)

    def hear(self) -> None:
        """Record that all processes are in step: they have computed a token together."""
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
        """Exit the process if the others were silent for `seconds`: not every backend reports a lost process. After a
        request to end, `PATIENCE` is the limit. For the main thread."""
        limit = PATIENCE if self.ending else max(seconds, PATIENCE)
        if self.many and time.monotonic() - self.heard > limit:
            note(
                f"[serve] nothing came from the other processes for {limit:.15g} s; this one ends alone"
            )
            os._exit(1)  # a thread is blocked in MLX, which cannot be interrupted

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
    """Return the elementwise sum of all processes' bytes."""
    # mlx's stub knows neither arrays of bytes nor bytes of arrays.
    total = mx.distributed.all_sum(mx.array(data))  # pyright: ignore[reportArgumentType]
    return bytes(memoryview(total))  # pyright: ignore[reportArgumentType]
