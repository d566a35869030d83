"""Notes about kernels on this Mac: which failed their test, and which ended a process.

A process tries the kernels of a format before it uses them. On a Mac it writes a note in the user's
cache folder before it tries them, and the outcome afterwards. Tiles that failed are not built again at
every start. Kernels that ended two processes in a row (as a GPU that hangs may) are not tried again
until the user asks for it; one death says little: closing a terminal ends a process, too. Each layout,
head dim and type has a note of its own, so that one failure distrusts no other kernels.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlxkv import __version__, console, files, untrusted
from mlxkv.metal.launch import SIGNATURES, body, header

PASSED, FAILED, TRYING, DIED = "passed", "failed", "trying", "died"
LONGEST = 1 << 20  # bytes of a file that is read
DEATHS = 2  # in a row, before what a process died of is not tried again
# Seconds. An older mark belongs to another process of the same number, or to one that hangs.
OLDEST = 600.0
_noted: dict[str, dict] = {}  # rows by their key, as this process knows them
_trying: set[str] = set()  # keys that this process is trying
_read = False


def _path() -> Path:
    return console.cache_dir() / "kernels.json"


@cache
def _machine() -> dict[str, str]:
    """Return what notes are valid for: another GPU, compiler or text starts without any."""
    texts = "".join(header(name) + body(name) for name in sorted(SIGNATURES))
    return {
        "device": str(mx.device_info().get("device_name", "")),
        "system": platform.mac_ver()[0] or platform.release(),
        "mlx": version("mlx"),
        "mlxkv": __version__,
        "text": sha256(texts.encode()).hexdigest(),
    }


def _key(layout: object, dims: int, dtype: mx.Dtype, tiled: bool) -> str:
    kind, name = "tiles" if tiled else "portable", str(dtype).split(".")[-1]
    return f"{kind} {dims} {name} {sha256(repr(layout).encode()).hexdigest()[:16]}"


def _file() -> dict[str, dict]:
    """Return the rows on disk; none if the file is damaged, or of another version or GPU."""
    try:
        data = json.loads(untrusted.read_tensors(_path(), LONGEST))
        rows = data["rows"] if data["here"] == _machine() else {}
        return {str(k): dict(row) for k, row in rows.items() if isinstance(row["state"], str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _rows() -> dict[str, dict]:
    global _read
    if not _read:
        _noted.update(_file() | _noted)
        _read = True
    return _noted


def forget() -> None:
    """Read the file again at the next question."""
    global _read
    _noted.clear()
    _read = False


@contextmanager
def _alone() -> Iterator[None]:
    """Keep other processes from changing the file meanwhile, where locks are possible."""
    number, path = None, _path()
    try:
        files.make_folder(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(path.with_suffix(".lock"), flags, 0o600)
        fcntl.flock(number, fcntl.LOCK_EX)
    except OSError:
        pass
    try:
        yield
    finally:
        if number is not None:
            os.close(number)


def _change(key: str, change: Callable[[dict | None], dict | None]) -> None:
    """Replace the row by what `change` returns, None for no row. Ignores a folder that cannot be written."""
    noted = _rows().get(key)
    with _alone():
        rows = _file()  # other processes may have written
        row = change(
            rows.get(key) or (noted if noted and noted["state"] in (PASSED, FAILED) else None)
        )
        for into in (_noted, rows):
            into.pop(key, None)
            if row is not None:
                into[key] = row
        with suppress(OSError), files.written(_path()) as file:
            file.write(json.dumps({"here": _machine(), "rows": rows}, indent=1).encode())


def state(layout: object, dims: int, dtype: mx.Dtype, tiled: bool = True) -> str | None:
    """Return PASSED, FAILED, DIED (with the processes that tried them), or None: to be tried, as another process may
    be doing now."""
    key = _key(layout, dims, dtype, tiled)
    row = _rows().get(key)
    if row is not None and row["state"] == TRYING and key not in _trying:
        _noted.pop(key)
        row = _file().get(key)  # the other process may be done by now
        _noted.update({} if row is None else {key: row})
    if row is None or row["state"] != TRYING:
        return None if row is None else row["state"]
    return DIED if key not in _trying and _deaths(row) >= DEATHS else None


def _is_left(row: dict) -> bool:
    """Return whether the process that left a mark is gone. This process's own marks do not count."""
    since, owner = row.get("since"), row.get("process")
    if not isinstance(since, float) or not abs(time.time() - since) <= OLDEST:
        return True
    if not isinstance(owner, int) or owner == os.getpid():  # this process was given its number
        return True
    return not _is_alive(owner)


def _deaths(row: dict | None) -> int:
    """Return how many processes in a row have died while they tried, by the row."""
    if row is None or row["state"] != TRYING:
        return 0
    deaths = row.get("deaths")
    return (deaths if isinstance(deaths, int) else 0) + _is_left(row)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def why_not(layout: object, dims: int, dtype: mx.Dtype, tiled: bool = True) -> str | None:
    """Return why such kernels must not be tried here, or None. Portable ones that failed are tried again: only
    plain ops would be left."""
    kernels, outcome = "tiles" if tiled else "kernels", state(layout, dims, dtype, tiled)
    if outcome == DIED:
        return (
            f"processes ended while they tried these {kernels}, {DEATHS} in a row; "
            "mlxkv doctor --all tries them again"
        )
    if outcome == FAILED and tiled:
        reason = _rows()[_key(layout, dims, dtype, tiled)].get("reason") or "no reason noted"
        return f"tiles failed their test here: {reason}; mlxkv doctor tries them again"
    return None


def note(
    layout: object,
    dims: int,
    dtype: mx.Dtype,
    passed: bool,
    tiled: bool = True,
    reason: str | None = None,
) -> None:
    """Keep the outcome of a test on this GPU."""
    row = {"state": PASSED if passed else FAILED} | ({"reason": reason} if reason else {})
    _change(_key(layout, dims, dtype, tiled), lambda _: row)


@contextmanager
def trial(layout: object, dims: int, dtype: mx.Dtype, tiled: bool = True) -> Iterator[None]:
    """Mark them as being tried by this process. At the end, restore the outcome that was known before, or
    keep the one that another process has written meanwhile."""
    key, earlier = _key(layout, dims, dtype, tiled), None
    mark = {"state": TRYING, "process": os.getpid(), "since": time.time()}

    def begin(row: dict | None) -> dict:
        nonlocal earlier
        earlier = row if row is not None and row["state"] in (PASSED, FAILED) else None
        return mark | {"deaths": _deaths(row)}

    def end(row: dict | None) -> dict | None:
        is_own = row is not None and {**row, "deaths": 0} == mark | {"deaths": 0}
        return earlier if is_own or row is None else row

    _change(key, begin)
    _trying.add(key)
    try:
        yield
    finally:
        _trying.discard(key)
        _change(key, end)
