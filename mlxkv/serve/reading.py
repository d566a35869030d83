"""Parse requests in worker processes: JSON, templates, schemas and tokenizers may need seconds and gigabytes for eight
million bytes, and must not block the streams of other clients.

Imports nothing heavy: a worker prepares its process before it imports the parsers.
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
from concurrent.futures import CancelledError, ProcessPoolExecutor
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

SECONDS = 3.0  # CPU time per request
PACE = 1 << 20  # bytes per additional second
MEMORY = 1 << 30  # bytes that parsing one request may allocate
# Bodies of at least this many bytes, and those with a schema, go to the second worker and do not delay others.
LARGE = 256 << 10
EVERY = 3  # every third turn of a key goes to its oldest request


class WorkerQueue:
    """Schedules a worker, one request at a time: round robin over keys; within a key the smallest body first, and every
    `EVERY`th time the oldest. So for itself and for each older request of its own key, a request waits for at most
    `EVERY` requests of each key. For the event loop."""

    def __init__(self):
        self.busy = False
        # By key, the next key first: its number of turns, and waiting bodies, the oldest first.
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
            bodies = [body for body in bodies if not body[1].done()]  # of connected clients
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
    """A process that parses the requests of one model, one at a time; restarted after it was killed. It can start, and
    import the parsers, before the model is loaded."""

    def __init__(self):
        self._setup, self._lock = b"", Lock()
        self._context: WorkerContext | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._has_ended = False

    def start(self) -> ProcessPoolExecutor:
        """Start the process unless it runs, without waiting for it to be ready. Raises Refused after `close`."""
        with self._lock:
            if self._has_ended:
                raise ending()
            process = self._context and self._context.process
            if self._pool is None or process is None or not process.is_alive():
                self._context = WorkerContext()
                self._pool = ProcessPoolExecutor(1, self._context, _prepare)
                # The server handles Ctrl-C, also before `_prepare`.
                signals = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                try:
                    self._pool.submit(_keep, self._setup)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            return self._pool

    def keep(self, setup: bytes) -> None:
        """Set the model. setup: pickled arguments of `Prompts`."""
        self._setup = setup
        with suppress(RuntimeError):  # it died, and another process follows; or `close` was first
            if self._pool is not None:
                self._pool.submit(_keep, setup)

    def read(self, seconds: float, *question: Any) -> Read:
        """Run `Prompts.read` in the process. seconds: CPU time limit. Raises its errors, and Refused if it exceeds a
        limit."""
        try:
            pool = self.start()
            answer, taken = pool.submit(_read, seconds, *question).result(PATIENCE + seconds)
        # RuntimeError: the process died, or `close` shut the pool down meanwhile, which cancels what waits.
        except (RuntimeError, CancelledError, TimeoutError):
            raise self._failure(seconds) from None
        if taken > KEPT:  # Python would keep the memory
            self._end()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _failure(self, seconds: float) -> Exception:
        """End the process, and return the error that explains its failure."""
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
    """Starts the one process of a pool, and keeps it: its exit code tells why it ended; the pool does not report it."""

    process: Any = None

    def Process(self, *args: Any, **settings: Any) -> Any:
        self.process = super().Process(*args, **settings)
        return self.process


class Reader:
    """Parses the requests for one model. For the event loop.

    tokenizer: mlx-lm's wrapper. template: extra arguments of the chat template. worker: a started one. packs: texts
    by name, as in `Prompts`.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: dict,
        model_info: ModelInfo,
        worker: Worker | None = None,
        packs: dict[str, str] | None = None,
    ):
        self._model_info = model_info
        system = takes_system(tokenizer, template)
        if not system:
            logging.warning(
                f"[serve] the chat template of {model_info.model} takes no system message; "
                "its words stand in front of the first question"
            )
        setup = tokenizer, template, system, model_info.vocabulary, packs
        self._prompts: Prompts | None = None
        self.workers: list[Worker] = []
        self.queues = [WorkerQueue(), WorkerQueue()]
        try:
            data = pickle.dumps(setup)
        except Exception:  # a C++ tokenizer that cannot be pickled
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
        """Parse a request body, like `Prompts.read`. key: the client's API key, for fair scheduling. Raises Refused
        and OtherModel."""
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
    """Return the request or the error, and the bytes allocated by parsing. The process is killed if it exceeds a
    limit."""
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
