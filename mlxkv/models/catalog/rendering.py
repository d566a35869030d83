"""Render chat templates in a process of their own, with bounded time and memory.

A template is a program that came with the model. The sandbox of jinja keeps it from files, but not from
loops without end or texts that double: only a process can be ended in the middle of either. One process
serves all models; it starts when the first one is loaded, renders with transformers' own function, and ends
with its parent. It takes 60 MB, and a text takes about .7 ms longer. (Counting steps by sys.settrace instead
makes rendering 3 times slower, and does not see memory: 35 doublings fill any machine.)
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from mlxkv.errors import UserError

SECONDS = 1.0  # of processor time for one text
PATIENCE = 60.0  # seconds by the clock, on a machine that is busy with other things
MEMORY = 1 << 30  # bytes for one text, beyond what the process takes at rest
FUNCTION = "render_jinja_template"  # of transformers: conversations and a template -> texts
# -I: neither this folder nor the environment choose what is imported, but this process' own path does.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import serve; serve()"


class Excess(ValueError):
    """A template took more time or memory than a text needs."""


class Renderer:
    """The process. Safe to use from several threads, one text at a time."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it runs, without waiting until it is ready."""
        with self._lock:
            self._started()

    def _started(self) -> subprocess.Popen:
        if self._owner != os.getpid():  # after a fork it is the parent's
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self._end()
            code = START.format(__name__)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", code, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        return self._process

    def ask(self, question: bytes) -> tuple[list[str], list]:
        """`render_jinja_template` of these arguments, as JSON. Raises Excess, and ValueError with what the
        template says."""
        with self._lock:
            process = self._started()
            watch = threading.Timer(PATIENCE, process.kill)
            watch.daemon = True
            watch.start()
            try:
                process.stdin.write(question + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = b""
            except BaseException:  # Ctrl-C: the answer must not meet the next question
                process.kill()
                raise
            finally:
                watch.cancel()
            if not answer.endswith(b"\n"):
                self._end()
                raise Excess(
                    f"the chat template takes more than {SECONDS:g} s of processor time or "
                    f"{MEMORY >> 20} MiB for one text"
                )
        reply = json.loads(answer)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["texts"], reply["places"]

    def _end(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    pipe.close()
            self._process.wait()
            self._process = None

    def end(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._end()


RENDERER = Renderer()
atexit.register(RENDERER.end)


def bound(tokenizer: Any, path: Path) -> None:
    """Make `tokenizer.apply_chat_template` of transformers render by `RENDERER`, and try it. A tokenizer with
    a renderer of its own, in code of transformers, is left alone.

    path: the model's folder. Raises UserError for a template that takes too much for one word.
    """
    call = getattr(type(tokenizer), "apply_chat_template", None)
    if not isinstance(call, FunctionType) or FUNCTION not in call.__code__.co_names:
        return
    original = call.__globals__[FUNCTION]

    def render(**arguments) -> tuple[list[str], list]:
        try:
            question = json.dumps(arguments).encode()
        except (TypeError, ValueError):  # functions as tools: of a program, not of a request
            return original(**arguments)
        return RENDERER.ask(question)

    # The same code, in which that one name means ours: nobody else's tokenizers change.
    names = {**call.__globals__, FUNCTION: render}
    method = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    method.__kwdefaults__ = call.__kwdefaults__
    tokenizer.apply_chat_template = MethodType(method, tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
    except Excess as error:
        raise UserError(f"[load] {error}; got {path}; choose another model") from None
    except Exception:
        return  # said when it is used: some templates refuse what others need


def serve() -> None:
    """The process: a JSON document a line, of a question on stdin and of its answer on stdout."""
    from transformers.utils.chat_template_utils import render_jinja_template

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # for whatever prints
    _bound_memory()
    for line in sys.stdin.buffer:
        arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends the process
        try:
            texts, places = render_jinja_template(**arguments)
            answer = {"texts": texts, "places": places}
        except MemoryError:
            os._exit(1)
        except Exception as error:  # of jinja, or raised by the template
            answer = {"error": str(error) or type(error).__name__}
        data = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(data + b"\n")
        out.flush()


def _bound_memory() -> None:
    """End this process where it takes MEMORY more than now. Linux refuses the memory; elsewhere a thread
    looks every 20 ms, which a single huge allocation outruns until the time is up."""
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, pages + MEMORY))
        return
    unit = 1 if sys.platform == "darwin" else 1 << 10
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + MEMORY

    def watch() -> None:
        while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit < limit:
            time.sleep(0.02)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
