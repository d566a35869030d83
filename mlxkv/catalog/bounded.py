"""Process foreign input (templates, requests, schemas) in subprocesses with bounded time and memory.

A sandbox does not stop a template from looping forever, a text of a million digits from taking gigabytes of tokens,
or a schema from compiling for a minute: only a process can be killed meanwhile. Each process serves one function of a
module, starts on demand, and ends with its parent. (Counting steps by sys.settrace makes templates 3 times slower and
does not bound memory: 35 doublings fill any machine.)
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

PATIENCE = 60.0  # seconds of wall clock beyond the processor time, for busy machines
# -I: imports depend only on this process's own path, not on the folder or the environment. Torch, which transformers
# would import, takes 180 MB.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); sys.modules['torch'] = None; "
    "from mlxkv import startup; startup.allow_few_descriptors(); "
    "from {} import prepare; from mlxkv.catalog.bounded import serve; serve(prepare())"
)
# Exit codes: Python's own for failed imports; ours for a limit exceeded.
FAILED, TOO_MUCH = 1, 3
KEPT = 256 << 20  # bytes; a process that used more is ended, since Python would not free them
FOREIGN = {-signal.SIGKILL, -signal.SIGTERM}  # signals from outside: the watch, the system, a user
# Bytes of the message; limits of seconds and bytes of memory, 0: none.
HEAD = struct.Struct("<Qdq")


class Excess(ValueError):
    """A time or memory limit was exceeded."""


class ProcessStopped(MachineError):
    """A process was killed from outside or did not start; its question is not the cause."""


class Process:
    """A process that answers questions by the function, bytes -> bytes, that a module's `prepare()` returns.
    Thread-safe; answers one question at a time. Restarted after it has ended."""

    def __init__(self, module: str):
        self._module = module
        self._process: subprocess.Popen | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.end)

    def start(self) -> None:
        """Start the process unless it runs; do not wait until it is ready."""
        with self._lock:
            self._start()

    def _start(self) -> subprocess.Popen:
        if self._owner != os.getpid():  # after a fork the process is the parent's
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
        """Return the answer to a question. seconds: limit of processor time. memory: limit of bytes beyond the
        process's current ones. 0: no limit. Raises Excess and ProcessStopped."""
        with self._lock:
            return self._exchange(self._start(), question, seconds, memory)

    def _exchange(
        self, process: subprocess.Popen, question: bytes, seconds: float, memory: int
    ) -> bytes:
        # A process over its processor time has ended itself by then (`serve`).
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
    """Return a message of `_send`; None at the end of the file."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    size, seconds, memory = HEAD.unpack(head)
    data = file.read(size)
    return (data, seconds, memory) if len(data) == size else None


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer questions from stdin on stdout."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints go to stderr
    bound = MemoryBound()
    while (received := _receive(sys.stdin.buffer)) is not None:
        question, seconds, memory = received
        bound.set(memory)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        try:
            data = answer(question)
        except MemoryError:
            os._exit(TOO_MUCH)
        signal.setitimer(signal.ITIMER_PROF, 0)
        bound.set(0)
        if not memory:  # memory of this question is reused by later ones
            bound.base = 0
        _send(out, data, memory=bound.taken)


class MemoryBound:
    """Ends this process when it exceeds its memory limit. Linux refuses the allocation; elsewhere a thread polls every
    20 ms, which a single huge allocation can evade until the time limit.

    base: bytes before the first question with a bound, 0 for none."""

    def __init__(self):
        self._statm = Path("/proc/self/statm")
        self._limit, self.base = sys.maxsize, 0
        if not self._statm.exists():
            threading.Thread(target=self._watch, daemon=True).start()

    def set(self, memory: int) -> None:
        """Limit this process's memory to `memory` bytes beyond its current ones; 0: no limit."""
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
        """Return the peak bytes of questions with a limit."""
        return self._peak() - self.base if self.base else 0

    def _peak(self) -> int:
        # getrusage includes the parent's memory from before exec.
        if self._statm.exists():
            status = self._statm.with_name("status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) << 10
        unit = 1 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _watch(self) -> None:
        while self._peak() < self._limit:
            time.sleep(0.02)
        os._exit(TOO_MUCH)
