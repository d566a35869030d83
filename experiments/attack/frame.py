"""What the areas share: an attempt and its verdict, commands and servers to attack, raw connections."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import experiments.attack
from experiments.fixtures import TINY
from mlxkv.bench.server.served import ServerProcess

PATIENCE = 60.0  # seconds until an attempt counts as a hang


@dataclass(frozen=True)
class Attempt:
    """One attack. held: whether what an operator expects came true. note: what came instead."""

    name: str
    held: bool
    note: str = ""


@dataclass(frozen=True)
class Area:
    """A module of attempts. title: the first line of its docstring."""

    name: str
    title: str

    def run(self, short: bool) -> Iterator[Attempt]:
        """Yield its attempts. short: a representative part, as CI runs it."""
        module = importlib.import_module(f"experiments.attack.{self.name}")
        yield from module.attempts(short)


def areas() -> list[Area]:
    """All areas: modules beside this one that have `attempts`."""
    out = []
    for found in pkgutil.iter_modules(experiments.attack.__path__):
        if found.name.startswith("_") or found.name == "frame":
            continue
        module = importlib.import_module(f"experiments.attack.{found.name}")
        if hasattr(module, "attempts"):
            out.append(Area(found.name, (module.__doc__ or "").splitlines()[0].rstrip(".")))
    return sorted(out, key=lambda area: area.name)


def tried(area: Area, short: bool) -> list[Attempt]:
    """All attempts of an area."""
    return list(area.run(short))


@dataclass(frozen=True)
class Ran:
    """A command that ended, or was stopped after `PATIENCE` seconds (code None)."""

    code: int | None
    out: bytes
    err: bytes
    seconds: float

    @property
    def one_line(self) -> bool:
        """Whether it was refused as bad input has to be: exit code 2, one line that says where, without
        control characters, on stderr."""
        lines = self.err.decode(errors="replace").strip().splitlines()
        return self.code == 2 and bool(lines) and lines[-1].startswith("[") and self.clean

    @property
    def clean(self) -> bool:
        """Whether no traceback and no control character reached the terminal."""
        shown = self.out + self.err
        raw = any(byte < 32 and byte not in b"\n\r\t" or byte == 127 for byte in shown)
        return not raw and b"Traceback" not in shown and b"MLXKV_TRACEBACK" not in shown

    @property
    def note(self) -> str:
        last = (self.err or self.out).decode(errors="replace").strip().splitlines()[-1:]
        return f"exit {self.code} after {self.seconds:.1f} s: {''.join(last)[:160]!r}"


def command(
    *options: str, typed: bytes = b"", seconds: float = PATIENCE, env: dict[str, str] | None = None
) -> Ran:
    """Run `mlxkv OPTIONS`, with `typed` as its stdin."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "mlxkv", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | (env or {}),
    )
    try:
        out, err = process.communicate(typed, timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        code = None
    return Ran(code, out, err, time.perf_counter() - start)


def server(*options: str, model: str = TINY, kv: str = "int4") -> ServerProcess:
    """A server in a process of its own, for `with`. Raises MachineError if it does not start."""
    return ServerProcess("--model", model, "--kv", kv, *options)


def raw(
    port: int, data: bytes, seconds: float = 5.0, half_close: bool = False
) -> tuple[bytes, str]:
    """Send bytes, read what comes. Returns it and how it ended: "eof", "timeout" or "reset"."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as line:
        try:
            line.sendall(data)
            if half_close:
                line.shutdown(socket.SHUT_WR)
            while part := line.recv(1 << 16):
                got += part
        except TimeoutError:
            return got, "timeout"
        except OSError:
            return got, "reset"
    return got, "eof"


def ask(
    port: int, body, path: str = "/v1/completions", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """POST a body (bytes, or anything that JSON takes). Returns status and body; status 0: no answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    line = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        line.request("POST", path, data, headers or {})
        response = line.getresponse()
        return response.status, response.read()
    except OSError as error:
        return 0, str(error).encode()
    finally:
        line.close()


def alive(port: int) -> bool:
    """Whether the server answers a plain request."""
    status, _ = ask(port, {"prompt": "Hi", "max_tokens": 1})
    return status == 200


def short_name(path: Path | str) -> str:
    """A path for a note: its last part."""
    return Path(path).name
