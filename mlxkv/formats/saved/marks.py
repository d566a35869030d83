"""Fingerprints of models, as files name them.

A fingerprint is 32 hex digits: 16 over every tensor, and the 16 that earlier versions made from the ends of
the weight files. Files of earlier versions name these 16 alone, and are recognised by them.
"""

from __future__ import annotations

DIGITS = 16


def same_model(stored: str, here: str) -> bool:
    """Return whether the fingerprint in a file names the model whose fingerprint is `here`."""
    if len(stored) > DIGITS:
        return stored[:DIGITS] == here[:DIGITS]
    return bool(stored) and stored == names(here)[-1]


def names(mark: str) -> list[str]:
    """The names of a model's files in a cache folder: of this version, then of earlier ones."""
    return [part for part in (mark[:DIGITS], mark[DIGITS:]) if part]
