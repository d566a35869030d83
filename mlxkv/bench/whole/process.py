"""Run a worker in its own process: whatever ends it becomes an answer, never an exception."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from tempfile import TemporaryFile

COMMAND = (sys.executable, "-m", "mlxkv.bench.whole.worker")
LONGEST = 300  # characters of an error


def call(request: dict, timeout: float | None, show: bool = False) -> dict:
    """Return a worker's answer to `request`, or {"error": why there is none}.

    timeout: seconds, or None. show: pass its stderr (a download) on to this process's stderr. Any
    exception while it waits, KeyboardInterrupt too, kills the worker and is raised again.
    """
    command = [*COMMAND, json.dumps(request | {"watched": True})]
    with TemporaryFile() as out, TemporaryFile() as err:
        # In its own session Ctrl-C does not reach it, and a kill reaches its children too. Its
        # stdin closes when this process ends (worker._watch).
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=None if show else err,
            start_new_session=True,
        )
        try:
            code = worker.wait(timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"stopped: no result within {timeout:g} s (--timeout)"}
        finally:
            _kill(worker)
        return _answer(code, _text(out), _text(err))


def _kill(worker: subprocess.Popen) -> None:
    if worker.poll() is None:
        try:
            os.killpg(worker.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            worker.kill()
        worker.wait()
    worker.stdin.close()


def _text(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _answer(code: int, out: str, err: str) -> dict:
    lines = out.strip().splitlines()
    if code == 0 and lines:
        try:
            answer = json.loads(lines[-1])
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            return answer
    last = (err.strip().splitlines() or [""])[-1]
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        why = f"was killed by {name}"
        if name == "SIGKILL":
            why += " (out of memory, most likely)"
    else:
        why = f"ended with code {code}" if code else "ended without a result"
    return {"error": f"the worker {why}: {last}"[:LONGEST].rstrip(": ")}
