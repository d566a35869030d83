"""Whose prompt cache a request reads and fills: how much of a prompt was known already, and how fast the
reply begins, tell what others have asked before. So nobody's caches are found by others."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

ROUNDS = 100_000  # a key cannot be guessed fast from the names of files


def tenant(key: str | None, user: str = "", salt: str = "") -> str:
    """The name of whoever asks: of an API key, and of a user and a salt that a request names. It tells none
    of them. "" for all who have none."""
    if not (key or user or salt):
        return ""
    parts = [_mark(key) if key else "", user, salt]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@lru_cache(1024)
def _mark(key: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", key.encode(), b"mlxkv tenant", ROUNDS).hex()
