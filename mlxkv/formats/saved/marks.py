"""Fingerprints of models, as files name them: 16 hex digits, to which files of earlier versions append others."""

from __future__ import annotations

DIGITS = 16


def same_model(stored: str, here: str) -> bool:
    """Return whether the fingerprint in a file names the model whose fingerprint is `here`."""
    return stored[:DIGITS] == here[:DIGITS]
