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
TEXTS = "texts"  # of a line that holds the rows of several


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
            parts = spread(json.loads(line))
            for row in parts:
                key(row)
        except (ValueError, KeyError, TypeError):
            continue  # a process was ended while it wrote
        yield from parts


def gathered(measured: Iterable[Row]) -> list[Row]:
    """Return rows that differ in their texts and numbers alone as one: lists of what differs, under "texts" the texts.
    Rows of questions and errors stay."""
    out: list[Row] = []
    groups: dict[Key, list[Row]] = {}
    for row in measured:
        if row["task"] != "kl" or "error" in row:
            out.append(row)
            continue
        like = (*(row[name] for name in IDENTITY if name != "text"), tuple(row))
        if like not in groups:
            groups[like] = []
            out.append({"task": row["task"], TEXTS: groups[like]})
        groups[like].append(row)
    return [_joined(row[TEXTS]) if TEXTS in row else row for row in out]


def _joined(group: list[Row]) -> Row:
    first = group[0]
    same = [name for name in first if all(row[name] == first[name] for row in group)]
    lists = {name: [row[name] for row in group] for name in first if name not in same}
    texts = lists.pop("text", [first["text"]] * len(group))
    return {name: first[name] for name in same if name != "text"} | {TEXTS: texts} | lists


def spread(row: Row) -> list[Row]:
    """Invert `gathered`: the rows of one line. A list as long as the texts is a number of each."""
    if TEXTS not in row:
        return [row]
    texts = row[TEXTS]
    lists = {name for name, value in row.items() if isinstance(value, list)}
    if any(len(row[name]) != len(texts) for name in lists):
        raise ValueError("lists of unequal lengths")
    return [
        {name: value[i] if name in lists else value for name, value in row.items() if name != TEXTS}
        | {"text": text}
        for i, text in enumerate(texts)
    ]


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
