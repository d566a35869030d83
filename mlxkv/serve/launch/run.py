"""Finds or starts a server, sets the environment, and runs the program."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from dataclasses import replace
from urllib.parse import urlsplit

from mlxkv.console import note, on, say, working
from mlxkv.errors import MachineError, UserError
from mlxkv.serve.launch.server import USUAL, Own, ask, name_of
from mlxkv.serve.launch.tools import KEY, Served, Start, Tool

LONGEST = 1 << 15  # tokens, in a dry run without a server, which would know


def run(
    tool: Tool, url: str | None, key: str | None, own: list[str], args: list[str], dry: bool
) -> int:
    """Start a program and return its exit code. own: options of a server to start. Raises UserError and
    MachineError."""
    program = shutil.which(tool.program)
    if program is None and not dry:
        raise MachineError(f"[launch] {tool.program} is not installed; {tool.install}")
    if url is not None and urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"[--url] must begin with http:// or https://; got {url[:80]!r}")
    key = key or next(iter(os.environ.get(KEY, "").splitlines()), "")
    if own:
        return _with_own(tool, program, own, args, dry)
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


def _with_own(tool: Tool, program: str | None, own: list[str], args: list[str], dry: bool) -> int:
    if dry:
        model = own[own.index("--model") + 1]
        say(shlex.join(["mlxkv", "serve", *own, "--port", "8080"]))
        return _start(tool, program, Served(USUAL, "", name_of(model), LONGEST), args, dry)
    server = Own(own)
    try:
        with working("starting mlxkv serve"):
            served = server.wait()
        note(f"{served.model} at {served.url}, {served.longest} tokens")
        return _start(tool, program, served, args, dry)
    finally:
        note("ending the server")
        server.end()


def _start(tool: Tool, program: str | None, served: Served, args: list[str], dry: bool) -> int:
    # A dry run shows no key. Without one the programs do not start; a server without keys reads none.
    key = ("..." if dry else served.key) if served.key else "mlxkv"
    start: Start = tool.start(replace(served, key=key))
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
            [program, *start.args, *args], env=env | start.env, preexec_fn=_interruptible
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


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored signals stay so in a child
