"""Keep results as lines of JSON, appended as computed, so that a stopped run can resume.

A row is the measurement of one model, preset and text: IDENTITY and the numbers, or "error" instead of them. "state"
is a digest of all other inputs of the numbers.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlxkv.errors import MachineError, UserError

Row = dict
IDENTITY = ("task", "split", "model", "preset", "windows", "text", "context")


def key(row: Row) -> tuple:
    """Return the identity of a row; a file has one result for each."""
    return tuple(row[name] for name in IDENTITY)


def read(files: Iterable[Path]) -> list[Row]:
    """Return the rows of .jsonl and .jsonl.gz files, one per key: results win over errors, later rows over
    earlier ones. Truncated lines are skipped. Raises UserError."""
    newest: dict[tuple, Row] = {}
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
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"[rows] cannot read; got {file}: {reason}") from None
    for line in text.splitlines():
        try:
            row = json.loads(line)
            key(row)
        except (ValueError, KeyError, TypeError):
            continue  # the process was killed while writing
        yield row


class Rows:
    """The rows of one file, which need not exist yet; of None, in memory. Raises UserError if its folder cannot be
    made."""

    def __init__(self, file: Path | None):
        self.file, self._cut = file, False
        self._newest: dict[tuple, Row] = {}
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            found = read([file]) if file.exists() else []
            self._cut = bool(found) and not file.read_bytes().endswith(b"\n")
        except OSError as error:
            reason = error.strerror
            raise UserError(f"[--out] cannot write there; got {file.parent}: {reason}") from None
        self._newest = {key(row): row for row in found}

    def get(self, identity: Row, state: str) -> dict | None:
        """Return the numbers measured of `identity` in this state, or None."""
        row = self._newest.get(key(identity))
        if row is None or "error" in row or row.get("state") != state:
            return None
        return {name: value for name, value in row.items() if name not in (*IDENTITY, "state")}

    def add(self, identity: Row, state: str, numbers: dict) -> None:
        """Append a row. Raises MachineError."""
        row = identity | {"state": state} | numbers
        self._newest[key(row)] = row
        if self.file is None:
            return
        line = "\n" * self._cut + json.dumps(row, ensure_ascii=False) + "\n"
        try:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(line)
        except OSError as error:
            raise MachineError(f"[eval] cannot keep a result: {error.strerror}") from None
        self._cut = False
