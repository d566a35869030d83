"""Work on what others wrote (templates, requests, schemas) in processes that end where it takes too long.

A sandbox does not keep a template from loops without end, a text of a million digits from gigabytes of tokens, or a
schema from a minute of compiling: only a process can be ended in the middle of them. Each serves one function of a
module, starts when it is needed, and ends with its parent. (Counting steps by sys.settrace instead makes templates 3
times slower, and does not see memory: 35 doublings fill any machine.)
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from mlxkv.errors import MachineError

PATIENCE = 60.0  # seconds by the clock beyond those of the processor, on a machine that is busy with other things
# -I: neither this folder nor the environment choose what is imported, but this process' own path does. Torch, which
# transformers would import, takes 180 MB.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); sys.modules['torch'] = None; "
    "from mlxkv import startup; startup.allow_few_descriptors(); "
    "from {} import prepare; from mlxkv.catalog.bounded import serve; serve(prepare())"
)
# Exit codes: Python's own, where modules could not be imported; of what takes too much.
FAILED, TOO_MUCH = 1, 3
KEPT = 256 << 20  # bytes; a process that took more is ended, since Python would keep them
FOREIGN = {-signal.SIGKILL, -signal.SIGTERM}  # of its own end: the watch, the system, somebody
# Bytes of what follows; seconds and bytes of memory that it may take, 0: any.
HEAD = struct.Struct("<Qdq")


class Excess(ValueError):
    """Something took more time or memory than it may."""


class ProcessStopped(MachineError):
    """A process was ended by others, or did not get to run: what it was asked had no part in that."""


class Process:
    """A process that answers questions with what a module's `prepare()` returns: a function, bytes -> bytes. Safe to
    use from several threads, one question at a time. One that was ended is followed by another."""

    def __init__(self, module: str):
        self._module = module
        self._process: subprocess.Popen | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.end)

    def start(self) -> None:
        """Start the process unless it runs, without waiting until it is ready."""
        with self._lock:
            self._start()

    def _start(self) -> subprocess.Popen:
        if self._owner != os.getpid():  # after a fork it is the parent's
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", START.format(self._module), json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        return self._process

    def ask(self, question: bytes, seconds: float = 0, memory: int = 0) -> bytes:
        """Return the answer to a question. seconds: of processor time that it may take, memory: bytes beyond those
        that the process has; 0: any. Raises Excess and ProcessStopped."""
        with self._lock:
            return self._exchange(self._start(), question, seconds, memory)

    def _exchange(
        self, process: subprocess.Popen, question: bytes, seconds: float, memory: int
    ) -> bytes:
        # Where it has taken its seconds, it is gone by then (`serve`).
        watch = threading.Timer(PATIENCE + seconds, process.kill)
        watch.daemon = True
        watch.start()
        answer = None
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, question, seconds, memory)
            answer = _receive(process.stdout)
        except OSError:
            pass
        except BaseException:  # Ctrl-C: the answer must not meet the next question
            process.kill()
            raise
        finally:
            watch.cancel()
        if answer is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)  # its exit code says why
            code = process.poll()
            self._end()
            if code in FOREIGN:
                raise ProcessStopped(
                    "[memory] a process that reads texts was stopped or ended, or memory is short; try again later"
                )
            if code == FAILED:
                raise MachineError(
                    "[memory] Python cannot start another process here; free memory, or end other programs"
                )
            raise Excess(
                f"takes more than {seconds:.15g} s of processor time or {memory >> 20} MiB"
            )
        data, _, taken = answer
        if taken > KEPT:
            self._end()
        return data

    def _end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            self._process.wait()
            self._process = None

    def end(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._end()


def _send(file: IO[bytes], data: bytes, seconds: float = 0, memory: int = 0) -> None:
    file.write(HEAD.pack(len(data), seconds, memory))
    file.write(data)
    file.flush()


def _receive(file: IO[bytes]) -> tuple[bytes, float, int] | None:
    """Return what `_send` has sent; None where the file ends before that."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    size, seconds, memory = HEAD.unpack(head)
    data = file.read(size)
    return (data, seconds, memory) if len(data) == size else None


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer questions from stdin on stdout."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # for whatever prints
    bound = MemoryBound()
    while (received := _receive(sys.stdin.buffer)) is not None:
        question, seconds, memory = received
        bound.set(memory)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
        try:
            data = answer(question)
        except MemoryError:
            os._exit(TOO_MUCH)
        signal.setitimer(signal.ITIMER_PROF, 0)
        bound.set(0)
        if not memory:  # what this took is there for questions to come
            bound.base = 0
        _send(out, data, memory=bound.taken)


class MemoryBound:
    """Ends this process where it takes more memory than it may. Linux refuses the memory; elsewhere a thread looks
    every 20 ms, which a single huge allocation outruns until the time is up.

    base: bytes before the first question with a bound, 0 for none."""

    def __init__(self):
        self._statm = Path("/proc/self/statm")
        self._limit, self.base = sys.maxsize, 0
        if not self._statm.exists():
            threading.Thread(target=self._watch, daemon=True).start()

    def set(self, memory: int) -> None:
        """Bound what this process takes beyond what it has now, in bytes; 0: not."""
        self.base = self.base or (memory and self._peak())
        if self._statm.exists():
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            now = int(self._statm.read_text().split()[0]) * resource.getpagesize()
            limit = hard if not memory else now + memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        else:
            self._limit = self._peak() + memory if memory else sys.maxsize

    @property
    def taken(self) -> int:
        """The most bytes that questions with a bound have taken."""
        return self._peak() - self.base if self.base else 0

    def _peak(self) -> int:
        # getrusage counts the parent's, too, from before this program began.
        if self._statm.exists():
            status = self._statm.with_name("status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) << 10
        unit = 1 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _watch(self) -> None:
        while self._peak() < self._limit:
            time.sleep(0.02)
        os._exit(TOO_MUCH)
