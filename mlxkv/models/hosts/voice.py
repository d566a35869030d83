"""What is said on stderr in programs of others."""

from __future__ import annotations

import os

from mlxkv.console import note, one_line
from mlxkv.models.hosts import watch


def is_quiet() -> bool:
    """Return whether only what is wrong is said: MLXKV_QUIET=1, and all but the first of several processes."""
    return (
        os.environ.get(watch.QUIET, "") not in watch.OFF or os.environ.get("MLX_RANK", "0") != "0"
    )


def say(text: str) -> None:
    """A line of ours on stderr, told apart from those of the program."""
    note(f"[mlxkv] {one_line(text)}")
