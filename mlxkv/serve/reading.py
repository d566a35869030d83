"""Requests are read in processes of their own: what JSON, templates, schemas and tokenizers make of eight million bytes
takes seconds and gigabytes, in which no stream of other clients may wait.

Imports nothing heavy: a worker prepares its process before it imports what reads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from mlxkv import startup
from mlxkv.catalog.bounded import FOREIGN, KEPT, PATIENCE, TOO_MUCH, MemoryBound
from mlxkv.errors import MachineError
from mlxkv.generate.roles import takes_system
from mlxkv.serve.refusals import OtherModel, Postponed, Refused, ending

if TYPE_CHECKING:
    from mlxkv.serve.prompts import Prompts
    from mlxkv.serve.request import ModelInfo, Read

SECONDS = 3.0  # of processor time for a request
PACE = 1 << 20  # bytes for which it has a second more
MEMORY = 1 << 30  # bytes that one request may take
# Bytes of a body that is read by the second worker, as is one with a schema: others do not wait for it.
LARGE = 256 << 10
EVERY = 3  # turns of a key, one of which goes to the request that waits longest


class WorkerQueue:
    """The turns at a worker, one request at a time. Keys come one after the other; of one key the smallest body comes
    first, and every `EVERY`th time the one that waits longest. So a request waits for at most `EVERY` others of each
    key for itself and for each of its own key that was there before it. For the event loop."""

    def __init__(self):
        self.busy = False
        # By key, the one whose turn it is first: its turns, and bodies that wait, the oldest first.
        self._waiting: dict[str | None, tuple[int, list[tuple[int, asyncio.Future]]]] = {}

    @asynccontextmanager
    async def acquire(self, size: int, key: str | None = None) -> AsyncIterator[None]:
        """Wait for a turn, with a body of `size` bytes from a client with this API key."""
        if self.busy:
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, (0, []))[1].append((size, future))
            try:
                await future
            except asyncio.CancelledError:
                if not future.cancelled():  # it was given in the same moment
                    self._pass_on()
                raise
        self.busy = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        for key in list(self._waiting):
            turns, bodies = self._waiting.pop(key)
            bodies = [
                body for body in bodies if not body[1].done()
            ]  # of clients that are still there
            if not bodies:
                continue
            turns += 1
            body = bodies[0] if turns % EVERY == 0 else min(bodies, key=lambda body: body[0])
            bodies.remove(body)
            body[1].set_result(None)
            if bodies:
                self._waiting[key] = turns, bodies
            return
        self.busy = False


class Worker:
    """A process that reads the requests of one model, one at a time. One that was ended is followed by another. It may
    start, and import what reads, before the model is there."""

    def __init__(self):
        self._setup, self._lock = b"", Lock()
        self._context: WorkerContext | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._has_ended = False

    def start(self) -> ProcessPoolExecutor:
        """Start the process unless it runs, without waiting until it is ready. Raises Refused after `close`."""
        with self._lock:
            if self._has_ended:
                raise ending()
            process = self._context and self._context.process
            if self._pool is None or process is None or not process.is_alive():
                self._context = WorkerContext()
                self._pool = ProcessPoolExecutor(1, self._context, _prepare)
                # Ctrl-C is for the server, also before `_prepare`.
                signals = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                try:
                    self._pool.submit(_keep, self._setup)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            return self._pool

    def keep(self, setup: bytes) -> None:
        """Read for a model from now on. setup: what `Prompts` takes, pickled."""
        self._setup = setup
        with suppress(BrokenExecutor):  # another process follows
            if self._pool is not None:
                self._pool.submit(_keep, setup)

    def read(self, seconds: float, *question: Any) -> Read:
        """Return what `Prompts.read` returns. seconds: of processor time that it may take. Raises what that raises, and
        Refused where it takes too much."""
        try:
            pool = self.start()
            answer, taken = pool.submit(_read, seconds, *question).result(PATIENCE + seconds)
        except (BrokenExecutor, TimeoutError):
            raise self._failure(seconds) from None
        if taken > KEPT:  # Python would keep the memory
            self._end()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _failure(self, seconds: float) -> Exception:
        """End the process, and return why it gave no answer."""
        code = self._end()
        if self._has_ended:
            return ending()
        if code in (-signal.SIGPROF, TOO_MUCH):
            limits = f"{seconds:.15g} s of processor time or {MEMORY >> 20} MiB"
            return Refused(400, f"[body] takes more than {limits} to read", "too_complex")
        if code in FOREIGN:
            reason = "a process that reads texts was stopped or ended, or memory is short"
            return Refused(503, f"[memory] {reason}; try again later", "busy", retry=5)
        return MachineError(
            "[memory] Python cannot start another process here; free memory, or end other programs"
        )

    def _end(self) -> int | None:
        """End the process, if it runs, and return its exit code."""
        with self._lock:
            pool, context = self._pool, self._context
            self._pool = self._context = None
        if pool is None or context is None:
            return None
        process, code = context.process, None
        if process is not None:
            process.kill()
            end = time.monotonic() + 1
            while (code := process.exitcode) is None and time.monotonic() < end:
                time.sleep(0.01)  # the pool waits for it, too
        pool.shutdown(wait=False, cancel_futures=True)
        return code

    def close(self) -> None:
        """End the process for good."""
        self._has_ended = True
        self._end()


class WorkerContext(SpawnContext):
    """Starts the one process of a pool, and keeps it: its exit code says why it has ended, which the pool does not."""

    process: Any = None

    def Process(self, *args: Any, **settings: Any) -> Any:
        self.process = super().Process(*args, **settings)
        return self.process


class Reader:
    """Reads the requests for one model. For the event loop.

    tokenizer: mlx-lm's wrapper. template: what chat templates are given besides messages. worker: one that has
    started.
    """

    def __init__(
        self, tokenizer: Any, template: dict, model_info: ModelInfo, worker: Worker | None = None
    ):
        self._model_info = model_info
        system = takes_system(tokenizer, template)
        if not system:
            logging.warning(
                f"[serve] the chat template of {model_info.model} takes no system message; "
                "its words stand in front of the first question"
            )
        setup = tokenizer, template, system, model_info.vocabulary
        self._prompts: Prompts | None = None
        self.workers: list[Worker] = []
        self.queues = [WorkerQueue(), WorkerQueue()]
        try:
            data = pickle.dumps(setup)
        except Exception:  # a tokenizer of C++, which no other process can have
            from mlxkv.serve.prompts import Prompts

            logging.warning("[serve] this model's tokenizer reads requests in the server itself")
            self._prompts = Prompts(*setup)
            if worker is not None:
                worker.close()
        else:
            self.workers = [worker or Worker(), Worker()]
            for each in self.workers:
                each.keep(data)
            self.workers[0].start()

    def close(self) -> None:
        """End its processes."""
        for worker in self.workers:
            worker.close()

    async def read(
        self, path: str, raw: bytes, budget: int | None, names: tuple = (), key: str | None = None
    ) -> Read:
        """Return the request in a body, as `Prompts.read` does. key: by which clients take turns. Raises Refused, and
        OtherModel."""
        question = path, raw, self._model_info, budget, names
        if self._prompts is not None:
            async with self.queues[0].acquire(len(raw), key):
                return await run_in_threadpool(self._prompts.read, *question)
        if len(raw) <= LARGE:
            try:
                info = replace(self._model_info, compiles=False)
                return await self._ask(0, key, path, raw, info, budget, names)
            except Postponed:
                pass
        return await self._ask(1, key, *question)

    async def _ask(self, number: int, key: str | None, path: str, raw: bytes, *more: Any) -> Read:
        worker, seconds = self.workers[number], SECONDS + len(raw) // PACE
        async with self.queues[number].acquire(len(raw), key):
            return await run_in_threadpool(worker.read, seconds, path, raw, *more)


# -- in the process

_prompts: Prompts
_bound: MemoryBound


def _prepare() -> None:
    os.setsid()  # signals of the terminal are for the server
    Thread(target=_end_with_parent, daemon=True).start()
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] 180 MB, which transformers would import
    startup.allow_few_descriptors()
    import mlxkv.serve.prompts  # noqa: F401


def _keep(setup: bytes) -> None:
    global _prompts, _bound
    if setup:
        from mlxkv.serve.prompts import Prompts

        _prompts, _bound = Prompts(*pickle.loads(setup)), MemoryBound()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _read(seconds: float, *question: Any) -> tuple[Read | Exception, int]:
    """Return the request or why there is none, and the bytes that reading has taken. Where it takes too much, this
    process ends."""
    _bound.set(MEMORY)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
    try:
        answer: Any = _prompts.read(*question)
    except MemoryError:
        os._exit(TOO_MUCH)
    except (Refused, Postponed, OtherModel) as error:
        answer = error
    except Exception as error:
        answer = MachineError(f"[serve] {type(error).__name__}: {error}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    _bound.set(0)
    return answer, _bound.taken
