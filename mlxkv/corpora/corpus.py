"""Read the corpus: text written for this project (MIT licence), the default of evaluation and
calibration.

The splits `calibration/` and `evaluation/` have different subjects and no passage in common. Each
has one file per kind. A line with a single `%` separates passages.
"""

from __future__ import annotations

from importlib.resources import files
from itertools import zip_longest

from mlxkv.errors import UserError

SPLITS = ("calibration", "evaluation")
KINDS = ("prose", "dialogue", "code", "mathematics", "languages", "tables")
PARTED = "\n%\n"


def _file(split: str, kind: str):
    if split not in SPLITS:
        raise UserError(f"[corpus] no such split; got {split!r}; choose from {', '.join(SPLITS)}")
    return files("mlxkv.corpora") / "texts" / split / f"{kind}.txt"


def pieces(split: str) -> dict[str, list[str]]:
    """Return the passages of each kind, in file order. Raises UserError for an unknown split."""
    return {
        kind: _file(split, kind).read_text(encoding="utf-8").strip("\n").split(PARTED)
        for kind in KINDS
    }


def passages(split: str) -> dict[str, str]:
    """Return the whole text of each kind, with an empty line between passages."""
    return {kind: "\n\n".join(parts) for kind, parts in pieces(split).items()}


def interleaved(split: str) -> list[str]:
    """Return all passages of a split, one of each kind in turn, so that any prefix is a mix."""
    return [piece for row in zip_longest(*pieces(split).values()) for piece in row if piece]
