"""Text written for this project, MIT licence as the rest: what evaluation and calibration read where
the user names no text of their own.

Two splits, `calibration/` and `evaluation/`, with different subjects and no passage in common; in
each a file per kind. Passages in a file are parted by a line that holds one `%`.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from itertools import zip_longest

from mlxkv.errors import UserError

SPLITS = ("calibration", "evaluation")
KINDS = ("prose", "dialogue", "code", "mathematics", "languages", "tables")
PARTED = "\n%\n"


def _file(split: str, kind: str):
    if split not in SPLITS:
        raise UserError(f"[corpus] no such split; got {split!r}; choose from {', '.join(SPLITS)}")
    return files(__name__) / split / f"{kind}.txt"


def pieces(split: str) -> dict[str, list[str]]:
    """The passages of each kind, in the order of the file. Raises UserError for an unknown split."""
    return {
        kind: _file(split, kind).read_text(encoding="utf-8").strip("\n").split(PARTED)
        for kind in KINDS
    }


def passages(split: str) -> dict[str, str]:
    """The whole text of each kind, an empty line between passages."""
    return {kind: "\n\n".join(found) for kind, found in pieces(split).items()}


def interleaved(split: str) -> list[str]:
    """All passages of a split, taken from the kinds in turn, so that every beginning is a mix."""
    return [piece for row in zip_longest(*pieces(split).values()) for piece in row if piece]


def digest(split: str) -> str:
    """SHA-256 over the names and bytes of a split's files, 64 hex digits."""
    total = sha256()
    for kind in KINDS:
        content = _file(split, kind).read_bytes()
        total.update(f"{split}/{kind}.txt {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()
