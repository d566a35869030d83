"""Finds or starts a server, sets the environment, and runs the program."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from mlxkv import untrusted
from mlxkv.console import note, on, say, working
from mlxkv.errors import MachineError, UserError
from mlxkv.serve.launch.tools import KEY, Served, Tool
from mlxkv.serve.options import PARENT

USUAL = "http://127.0.0.1:8080"
LONGEST = 1 << 15  # tokens, in a dry run without a server, which would know
ANSWER_SECONDS = 5.0
END_SECONDS = 30.0  # sessions go to disk meanwhile


def run(
    tool: Tool, url: str | None, key: str | None, options: list[str], args: list[str], dry: bool
) -> int:
    """Start a program and return its exit code. options: of a server to start. Raises UserError and
    MachineError."""
    program = shutil.which(tool.program)
    if program is None and not dry:
        raise MachineError(f"[launch] {tool.program} is not installed; {tool.install}")
    if options and dry:
        path = Path(model := options[options.index("--model") + 1]).expanduser()
        name = path.resolve().name if path.exists() else model
        say(shlex.join(["mlxkv", "serve", *options, "--port", "8080"]))
        return _start(tool, program, Served(USUAL, "", _sound(name), LONGEST), args, dry)
    if options:
        with started(options) as served:
            note(f"{served.model} at {served.url}, {served.longest} tokens")
            return _start(tool, program, served, args, dry)
    if url is not None and not _is_url(url):
        raise UserError(
            f"[--url] must begin with http:// or https://, and a host; got {url[:80]!r}"
        )
    key = key or next(iter(os.environ.get(KEY, "").splitlines()), "")
    where = (url or USUAL).rstrip("/").removesuffix("/v1")
    served = ask(where, key)
    if served is None and url is not None:
        raise MachineError(f"[--url] no server of mlxkv answers at {where}")
    if served is None:
        raise UserError(
            f"[--model] needed to start a server; got none, and none answers at {where}; choose from "
            "mlxkv models, such as qwen3-4b"
        )
    return _start(tool, program, served, args, dry)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no address of IPv6, no number of a port
        return False


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *args):
        """Return that there is none: it would carry the key to another host."""
        return None


def ask(url: str, key: str) -> Served | None:
    """The server at a URL, None where no server of ours answers. Raises UserError for a wrong key, and for the name
    of a model that programs would take for something else."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # Not by a proxy: the server is asked for by its address.
        with build_opener(ProxyHandler({}), _NoRedirects).open(
            Request(f"{url}/v1/kv", headers=headers), timeout=ANSWER_SECONDS
        ) as response:
            about = untrusted.parse(response.read(1 << 20))
        name = _sound(str(about["model"]))
        return Served(url, key, name, untrusted.whole(about["longest_tokens"], "longest_tokens"))
    except UserError:
        raise
    except HTTPError as error:
        if error.code in (401, 429):
            raise UserError(
                f"[--api-key] the server at {url} refuses this key; got "
                f"{'one' if key else 'none'}; set --api-key or {KEY}"
            ) from None
        return None
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return None


def _sound(model: str) -> str:
    """A model's name. Raises UserError where OpenCode would put a variable or a file into it ({env:HOME}), or no
    configuration can hold it."""
    if not model.isprintable() or re.search(r"\{(env|file):", model):
        raise UserError(
            f"[--model] its name would mean something else to the program; got {ascii(model)[:80]}; rename its folder"
        )
    return model


@contextmanager
def started(options: list[str]) -> Iterator[Served]:
    """A server on a free port of this machine, with a key of its own, as long as the block. Raises MachineError.

    What it says goes to a file: a program that draws on the terminal would be written over."""
    key = secrets.token_urlsafe(24)
    with TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlxkv", "serve", "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {KEY: key, PARENT: str(os.getpid())},
            start_new_session=True,  # Ctrl-C is for the program, and not for its server
        )
        try:
            with working("starting mlxkv serve"):
                served = _wait(server, log, key)
            yield served
        finally:
            note("ending the server")
            server.terminate()  # as Ctrl-C would: sessions are put away
            try:
                server.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(server: subprocess.Popen, log: IO[bytes], key: str) -> Served:
    """Wait until a server answers. Raises MachineError where it ends before that."""
    while True:
        ended = server.poll() is not None
        # Reading by position must not move the server's.
        lines = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
        for line in lines:
            if line.startswith("chat: ") and (served := ask(line.split()[1].rstrip("/"), key)):
                return served
        if ended:
            reason = lines[-1] if lines else "no output"
            raise MachineError(f"[launch] the server did not start: {reason}")
        time.sleep(0.1)


def _start(tool: Tool, program: str | None, served: Served, args: list[str], dry: bool) -> int:
    # A dry run shows no key. Without one the programs do not start; a server without keys reads none.
    key = ("..." if dry else served.key) if served.key else "mlxkv"
    start = tool.start(replace(served, key=key))
    if dry:
        for name in start.unset:
            say(f"unset {name}")
        for name, value in start.env.items():
            say(f"export {name}={shlex.quote(value)}")
        say(shlex.join([tool.program, *start.args, *args]))
        if program is None:
            note(f"{tool.program} is not installed; {tool.install}")
        return 0
    env = {name: value for name, value in os.environ.items() if name not in start.unset}
    before = on(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program
    try:
        child = subprocess.Popen(
            [program, *start.args, *args],
            env=env | start.env,
            # Ignored signals stay so in a child.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for number in (signal.SIGTERM, signal.SIGHUP):  # told to it; we end when it has
            on(number, lambda number, frame: child.send_signal(number))
        code = child.wait()
        return 128 - code if code < 0 else code
    except OSError as error:
        raise MachineError(f"[launch] {tool.program} does not start: {error.strerror}") from None
    finally:
        signal.signal(signal.SIGINT, before)
        for number in (signal.SIGTERM, signal.SIGHUP):
            on(number, signal.SIG_DFL)
