"""Record which kernels failed their test on this Mac, and which ended a process.

A process tests the kernels of a format before using them. On a Mac it appends a line to a file in the user's cache
folder before the test, and another with the outcome afterwards. Failed tiles are not rebuilt at every start. Kernels
that ended two processes in a row (a hung GPU can do that) are not tried again until the user asks for it; a single one
proves little, since closing a terminal ends a process, too. Each layout, head dim and type has separate lines, so that
one failure does not disable other kernels.
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

Kernels = tuple[object, int, mx.Dtype, str]  # layout, head dim, dtype, backend name
TRYING, STOPPED, PASSED, FAILED = "trying", "stopped", "passed", "failed"
TILES, ROWS = "tile kernels", "kernels by rows"  # backends that others can replace
LONGEST = 1 << 20  # most bytes of the file
DEATHS = 2  # consecutive processes ended before kernels are no longer tried


def _path() -> Path:
    return console.cache_dir() / "kernels.txt"


@cache
def _machine() -> str:
    """Return the key under which notes are valid: GPU, system, MLX, mlxkv and kernel sources."""
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
                file.truncate(0)  # start afresh: every kernel is tried again
            file.write(line.encode())


def _known(kernels: Kernels) -> tuple[int, str | None]:
    """Return how many consecutive processes ended while testing these kernels, and why the last test failed."""
    deaths, fault, key = 0, None, _key(kernels)
    try:
        lines = untrusted.read_tensors(_path(), LONGEST).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):  # missing, or not our file
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
    """Return whether `DEATHS` consecutive processes ended while testing these kernels."""
    return _known(kernels)[0] >= DEATHS


def why_not(kernels: Kernels) -> str | None:
    """Return why these kernels must not be tried here, or None.

    Failed portable kernels are tried again, since the only fallback is plain ops.
    """
    (deaths, fault), tiled = _known(kernels), kernels[3] in (TILES, ROWS)
    if deaths >= DEATHS:
        return (
            f"processes ended while they tried these {'tiles' if tiled else 'kernels'}, {DEATHS} in a row; "
            "mlxkv doctor --all tries them again"
        )
    if fault is not None and tiled:
        return f"tiles failed their test here: {fault}; mlxkv doctor tries them again"
    return None


def note(kernels: Kernels, reason: str | None) -> None:
    """Record the outcome of a test on this GPU. reason: None if it passed."""
    _write(PASSED if reason is None else FAILED, kernels, reason or "")


@contextmanager
def trial(kernels: Kernels) -> Iterator[None]:
    """Record that this process is testing `kernels`, so that later ones can tell if it ends meanwhile."""
    _write(TRYING, kernels)
    try:
        yield
    finally:
        _write(STOPPED, kernels)
