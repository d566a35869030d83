"""Parse the options of `python -m experiments.NAME`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NoReturn

from mlxkv.errors import UserError
from mlxkv.machine import machine, versions


class Parser(argparse.ArgumentParser):
    """name: of the experiment. doc: its docstring, which --help shows. A mistake is a UserError."""

    def __init__(self, name: str, doc: str | None):
        super().__init__(
            prog=f"python -m experiments.{name}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.name = name

    def error(self, message: str) -> NoReturn:
        raise UserError(f"[{self.name}] {message}; --help lists the options")


def words(text: str) -> tuple[str, ...]:
    """Split 'a, b,a' into ('a', 'b')."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def at_least(option: str, got: int, least: int) -> None:
    """Raise UserError if `got` is less than `least`."""
    if got < least:
        raise UserError(f"[{option}] must be at least {least}; got {got}; choose {least} or more")


def check_out(out: Path | None) -> None:
    """Raise UserError if the folder of the file `out` does not exist."""
    if out is not None and not out.parent.is_dir():
        raise UserError(f"[--out] no such folder; got {out.parent}; make it first")


def made_on(start: float) -> dict:
    """Return machine, versions and seconds since `start` (perf_counter), for a document."""
    from mlxkv.metal import gpu  # imports MLX

    return {
        "machine": machine() | gpu.device(),
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }
