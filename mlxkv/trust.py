"""What this Mac's kernels are known for: tiles that failed, and kernels that a process died of.

A process tries the kernels of a format before it uses them. On a Mac it says so first in a note in the
user's cache folder, and what came of it afterwards. What failed as tiles is not built again at every
start, and what ended a process (a GPU that hangs may) is not tried again until the user asks for it.
One note for each layout, head dim and type, so that what fails distrusts nothing but itself.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from mlxkv import __version__, console
from mlxkv.metal.launch import SIGNATURES, body, header

PASSED, FAILED, TRYING, DIED, BUSY = "passed", "failed", "trying", "died", "busy"
LONGEST = 1 << 20  # bytes of a file that is read
_known: dict[str, dict] = {}  # rows by their key, as this process knows them
_read = False


def _path() -> Path:
    return console.cache_dir() / "kernels.json"


@cache
def _here() -> dict[str, str]:
    """What the notes hold for: any other GPU, compiler or text has none."""
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
    """The rows on disk. Whatever else lies there, a file of another version or GPU too, is no note."""
    try:
        with _path().open("rb") as file:
            data = json.loads(file.read(LONGEST))
        rows = data["rows"] if data["here"] == _here() else {}
        return {str(k): dict(row) for k, row in rows.items() if isinstance(row["state"], str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _rows() -> dict[str, dict]:
    global _read
    if not _read:
        _known.update(_file() | _known)
        _read = True
    return _known


def forget() -> None:
    """Look at the file again when asked next."""
    global _read
    _known.clear()
    _read = False


def _write(key: str, row: dict | None) -> None:
    """Put a row, or take it away (None). A folder that cannot be written is no fault."""
    _rows()
    rows = _file()  # other processes may have written
    for into in (_known, rows):
        into.pop(key, None)
        if row is not None:
            into[key] = row
    path, name = _path(), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=".kernels-", dir=path.parent)  # mode 0600
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump({"here": _here(), "rows": rows}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        if name is not None:
            with suppress(OSError):
                os.unlink(name)


def state(layout: object, dims: int, dtype: mx.Dtype, tiled: bool = True) -> str | None:
    """PASSED, FAILED, DIED (a process that tried them), BUSY (one is at it), None: not tried here."""
    key = _key(layout, dims, dtype, tiled)
    row = _rows().get(key)
    if row is not None and row["state"] == TRYING and row.get("process") != os.getpid():
        row = _file().get(key)  # the other process may be done by now
        _known.update({} if row is None else {key: row})
    if row is None or row["state"] != TRYING:
        return row and row["state"]
    owner = row.get("process")
    if owner == os.getpid():
        return None
    return BUSY if isinstance(owner, int) and _is_alive(owner) else DIED


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def why_not(layout: object, dims: int, dtype: mx.Dtype, tiled: bool = True) -> str | None:
    """Why such kernels are not to be tried here, or None. Portable ones that failed are: plain ops are
    all there is besides."""
    what, found = "tiles" if tiled else "kernels", state(layout, dims, dtype, tiled)
    if found == DIED:
        return f"a process ended while it tried these {what}; mlxkv doctor --all tries them again"
    if found == BUSY:
        return f"another process is trying these {what}"
    if found == FAILED and tiled:
        said = _rows()[_key(layout, dims, dtype, tiled)].get("reason") or "no reason noted"
        return f"tiles failed their test here: {said}; mlxkv doctor tries them again"
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
    row = {"state": PASSED if passed else FAILED}
    _write(_key(layout, dims, dtype, tiled), row | ({"reason": reason} if reason else {}))


@contextmanager
def trial(layout: object, dims: int, dtype: mx.Dtype, tiled: bool = True) -> Iterator[None]:
    """While inside, the note says that this process is trying them; afterwards what it said before."""
    key = _key(layout, dims, dtype, tiled)
    before = _rows().get(key)
    _write(key, {"state": TRYING, "process": os.getpid()})
    try:
        yield
    finally:
        kept = before if before and before["state"] in (PASSED, FAILED) else None
        _write(key, kept)
