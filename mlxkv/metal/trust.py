"""Notes about kernels on this Mac: which failed their test, and which ended a process.

A process tries the kernels of a format before it uses them. On a Mac it appends a line to a file in the user's cache
folder before, and one with the outcome afterwards. Tiles that failed are not built again at every start. Kernels that
ended two processes in a row (as a GPU that hangs may) are not tried again until the user asks for it; one death says
little: closing a terminal ends a process, too. Each layout, head dim and type has lines of its own, so that one failure
distrusts no other kernels.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlxkv import __version__, console, files, untrusted
from mlxkv.metal.launch import SIGNATURES, body, header

Kernels = tuple[object, int, mx.Dtype, str]  # layout, head dim, type, name of their backend
TRYING, STOPPED, PASSED, FAILED = "trying", "stopped", "passed", "failed"
TILES = "tile kernels"
LONGEST = 1 << 20  # bytes of the file
DEATHS = 2  # in a row, before what a process died of is not tried again


def _path() -> Path:
    return console.cache_dir() / "kernels.txt"


@cache
def _machine() -> str:
    """Return what notes are valid for: another GPU, compiler or text starts without any."""
    parts = [
        str(mx.device_info().get("device_name", "")),
        platform.mac_ver()[0] or platform.release(),
        version("mlx"),
        __version__,
        *(header(name) + body(name) for name in sorted(SIGNATURES)),
    ]
    return " ".join(parts)


def _key(kernels: Kernels) -> str:
    return sha256(f"{kernels} {_machine()}".encode()).hexdigest()[:24]


def _write(state: str, kernels: Kernels, reason: str = "") -> None:
    """Append a line: state, process, key, reason. Ignores a folder that cannot be written."""
    line = f"{state} {os.getpid()} {_key(kernels)} {' '.join(reason.split())[:500]}\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError):
        files.make_folder(_path().parent)
        with open(os.open(_path(), flags, 0o600), "ab", buffering=0) as file:
            if file.tell() > LONGEST // 2:
                file.truncate(0)  # all is tried once more
            file.write(line.encode())


def _known(kernels: Kernels) -> tuple[int, str | None]:
    """Return how many processes in a row have ended while they tried these kernels, and why the last test failed."""
    deaths, fault, key = 0, None, _key(kernels)
    try:
        lines = untrusted.read_tensors(_path(), LONGEST).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):  # none, or no file of ours
        lines = []
    for line in lines:
        state, process, named, *reason = [*line.split(" ", 3), "", ""]
        if named == key:
            deaths = deaths + (not _is_alive(process)) if state == TRYING else 0
            if state in (PASSED, FAILED):
                fault = (reason[0] or "no reason noted") if state == FAILED else None
    return deaths, fault


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (OSError, ValueError, OverflowError) as error:
        return isinstance(error, PermissionError)
    return True


def ended_processes(kernels: Kernels) -> bool:
    """Return whether `DEATHS` processes in a row ended while they tried these kernels."""
    return _known(kernels)[0] >= DEATHS


def why_not(kernels: Kernels) -> str | None:
    """Return why these kernels must not be tried here, or None. Portable ones that failed are tried again: only plain
    ops would be left."""
    (deaths, fault), tiled = _known(kernels), kernels[3] == TILES
    if deaths >= DEATHS:
        return (
            f"processes ended while they tried these {'tiles' if tiled else 'kernels'}, {DEATHS} in a row; "
            "mlxkv doctor --all tries them again"
        )
    if fault is not None and tiled:
        return f"tiles failed their test here: {fault}; mlxkv doctor tries them again"
    return None


def note(kernels: Kernels, reason: str | None) -> None:
    """Keep the outcome of a test on this GPU: None for one that was passed."""
    _write(PASSED if reason is None else FAILED, kernels, reason or "")


@contextmanager
def trial(kernels: Kernels) -> Iterator[None]:
    """Leave a line while this process tries them, which says more if it ends meanwhile."""
    _write(TRYING, kernels)
    try:
        yield
    finally:
        _write(STOPPED, kernels)
