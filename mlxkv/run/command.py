"""The command `mlxkv run`. Imports nothing heavy: the program begins at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

from typer import Argument, Option

from mlxkv.errors import UserError
from mlxkv.formats.names import canonical, check_windows, complete_kv, parse_kv
from mlxkv.models.hosts import watch
from mlxkv.run import program, start

# A program's own options for compressing its caches; --kv replaces what they ask for.
THEIRS = ("--kv-bits", "--kv-quant-scheme", "--kv-k-bits", "--kv-v-bits")


def run(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="PROGRAM [ARGS]...",
            help="A command, python SCRIPT, SCRIPT.py, -m MODULE (after --) or a module's name.",
            show_default=False,
        ),
    ] = None,
    kv: Annotated[
        str | None,
        Option(
            "--kv",
            help="Cache preset (mlxkv presets), or KEYS/VALUES. Default: MLXKV, or int4.",
            autocompletion=complete_kv,
        ),
    ] = None,
    strict: Annotated[
        bool,
        Option("--strict", help="End with code 2 where a layer that grows stays uncompressed."),
    ] = False,
    windows: Annotated[
        int | None,
        Option(
            "--kv-windows",
            help="Compress sliding windows of at least so many tokens, too. Default: none.",
        ),
    ] = None,
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="No reports on stderr, only what is wrong.")
    ] = False,
) -> Callable[[], int]:
    """Run a program that is built on mlx-lm or mlx-vlm, unchanged, with compressed caches:
    mlxkv run --kv int4 -- mlx_lm.server --model MODEL"""
    kv = kv if kv is not None else watch.asked() or "int4"
    config = parse_kv(kv)
    check_windows(windows)
    found = program.find(words or [])
    if config.compresses:
        check_options(found.args, kv)
    environment = {watch.KV: canonical(kv)}
    environment |= {watch.STRICT: "1"} if strict else {}
    environment |= {watch.WINDOWS: str(windows)} if windows is not None else {}
    environment |= {watch.QUIET: "1"} if quiet else {}
    os.environ.update(environment)
    return lambda: start.start(found)


def check_options(args: list[str], kv: str) -> None:
    """Raise UserError where the program is told to compress its caches itself."""
    for arg in args:
        if (name := arg.partition("=")[0].replace("_", "-")) in THEIRS:
            raise UserError(
                f"[run] {name} has the program compress its caches itself; got --kv {kv} besides; leave one "
                "of them out"
            )
