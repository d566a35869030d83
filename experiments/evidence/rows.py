"""Keep results as lines of JSON, which several processes append to one file.

A row is what was measured of one model, preset and text: "task" (kl or retrieval), "split", "model",
"preset", "windows", "text", "context" and the numbers, or "error" in their place. "state" is a digest of
the model's files and the text, "when" seconds since 1970.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxkv.errors import UserError

Row = dict
Key = tuple
IDENTITY = ("task", "split", "model", "preset", "windows", "text", "context")


def key(row: Row) -> Key:
    """Return what a row is of; a file holds one result for it."""
    return tuple(row[name] for name in IDENTITY)


def read(files: Iterable[Path]) -> list[Row]:
    """Return the rows of all files, one per key: a result goes before an error, a later row before an
    earlier one. Lines that were cut off are left out. Raises UserError."""
    newest: dict[Key, Row] = {}
    for file in files:
        for row in _lines(file):
            old = newest.get(key(row))
            if old is None or "error" in old or "error" not in row:
                newest[key(row)] = row
    return list(newest.values())


def _lines(file: Path) -> Iterator[Row]:
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode(errors="replace")
    except (OSError, EOFError) as error:
        raise UserError(
            f"[rows] cannot read; got {file}: {getattr(error, 'strerror', None) or error}"
        ) from None
    for line in text.splitlines():
        try:
            row = json.loads(line)
            key(row)
        except (ValueError, KeyError, TypeError):
            continue  # a process was ended while it wrote
        yield row


def append(file: Path, row: Row) -> None:
    """Add a row; other processes may do so at the same time."""
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    with file.open("ab") as out, _alone(out.fileno()):
        if out.tell() and not _ends_a_line(file):
            line = b"\n" + line  # what stands there was cut off
        out.write(line)


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as written:
        written.seek(-1, os.SEEK_END)
        return written.read(1) == b"\n"


@contextmanager
def _alone(handle: int) -> Iterator[None]:
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that goes with the process, so that several of them make one thing once."""
    with file.open("ab") as lock, _alone(lock.fileno()):
        yield
