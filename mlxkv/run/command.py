"""`mlxkv run`: run a program built on mlx-lm or mlx-vlm in this process, with compressed caches."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mlxkv import console
from mlxkv.catalog.aliases import is_model
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv
from mlxkv.options import Kv
from mlxkv.run import Options
from mlxkv.run.wrap import watch

# A program's own options for compressing its caches; --kv replaces what they ask for.
THEIRS = ("--kv-bits", "--kv-quant-scheme", "--kv-k-bits", "--kv-v-bits")
PYTHON = re.compile(r"python[\d.]*(\.exe)?")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FIRST = 4096  # bytes of a script in which its interpreter is named
BY_SHELL = re.compile(rb"""^'''exec'\s+"?([^"\s]+)"?""", re.M)  # of pip and uv, for long paths
# Files that no traceback has to show.
INSIDE = {__file__, runpy.__file__, f"<frozen {runpy.__name__}>"}


def run_program(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="PROGRAM [ARGS]...",
            help="A command, python SCRIPT, SCRIPT.py, -m MODULE (after --) or a module's name.",
            show_default=False,
        ),
    ] = None,
    kv: Kv = "int4",
    strict: Annotated[
        bool,
        Option(
            "--kv-strict",
            "--strict",
            help="Exit with code 2 if a layer that grows stays uncompressed.",
        ),
    ] = False,
    quiet: Annotated[
        bool,
        Option(
            "--quiet",
            "-q",
            help="Hide the reports on stderr, but not what is wrong.",
            rich_help_panel="Output",
        ),
    ] = False,
) -> Callable[[], int]:
    """Run a program that is built on mlx-lm or mlx-vlm, unchanged, with compressed caches:
    mlxkv run --kv int4 -- mlx_lm.server --model MODEL"""
    config = parse_kv(kv)
    program = find(words or [])
    if config.compresses:
        check_options(program.args, kv)
    quiet = quiet or os.environ.get("MLX_RANK", "0") != "0"  # one of several processes reports
    return lambda: start(program, Options(config, strict, quiet))


def check_options(args: list[str], kv: str) -> None:
    """Raise UserError if the program is told to compress its caches itself."""
    for arg in args:
        if (name := arg.partition("=")[0].replace("_", "-")) in THEIRS:
            raise UserError(
                f"[run] {name} has the program compress its caches itself; got --kv {kv} besides; leave one "
                "of them out"
            )


# -- what to start


@dataclass(frozen=True)
class Program:
    """What to start. name: of the Python file, or of the module. args: what follows on its command line."""

    name: str
    args: list[str]
    is_module: bool = False


def find(words: list[str]) -> Program:
    """Return the program that a command line names: as a shell finds it, else next to this Python, else as a module.
    Raises UserError."""
    if not words:
        raise UserError(
            "[run] no program; got nothing after the options; write it like mlxkv run --kv int4 -- "
            "mlx_lm.generate --model MODEL"
        )
    first, *args = words
    if Path(first).name == "mlxkv":
        raise UserError("[run] mlxkv's own commands take --kv themselves; got mlxkv; leave run out")
    if first == "-m":
        if not args or not _is_module(args[0]):
            raise UserError(f"[run] no such module here; got {' '.join(words[:2])!r}")
        return Program(args[0], args[1:], True)
    if first.endswith(".py") and Path(first).is_file():
        return Program(first, args)
    if first in ("python", "python3"):  # this one, whatever a shell finds
        return _of_python(first, args)
    path = shutil.which(first)
    python = None if path is None else interpreter(path)
    if path is not None and python is not None and is_this(python):
        return Program(path, args) if python != path else _of_python(path, args)
    beside = str(Path(sys.executable).parent / first)
    if os.sep not in first and interpreter(beside) not in (None, beside):
        return Program(beside, args)
    if DOTTED.fullmatch(first) and _is_module(first):
        return Program(first, args, True)
    if python is not None:
        raise UserError(
            f"[run] another Python runs this program; got {path} by {python}; install mlxkv there "
            f"({python} -m pip install mlxkv), and start {python} -m mlxkv run"
        )
    if path is not None:
        raise UserError(f"[run] no program of Python; got {path}; name the program that it starts")
    names = sorted(entry_points(group="console_scripts").names)
    close = get_close_matches(first, names, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    if is_model(first):
        hint = f"did you mean mlxkv chat -m {first}? "
    raise UserError(
        f"[run] no such program; got {first!r}; {hint}choose a command, python SCRIPT, SCRIPT.py, -m MODULE "
        "or a module's name"
    )


def _of_python(python: str, args: list[str]) -> Program:
    """Return the program of `python SCRIPT` and `python -m MODULE`."""
    if args[:1] == ["-m"]:
        return find(args)
    if args and Path(args[0]).is_file():
        return Program(args[0], args[1:])
    raise UserError(
        f"[run] Python's own options are not taken; got {' '.join([python, *args[:1]])!r}; write python "
        "SCRIPT, or -m MODULE"
    )


def interpreter(path: str) -> str | None:
    """Return the Python that a script names in its first lines, `path` itself if it is a Python, or None."""
    if PYTHON.fullmatch(Path(path).name):
        return path
    try:
        with open(path, "rb") as file:
            head = file.read(FIRST)
    except OSError:
        return None
    if not head.startswith(b"#!"):
        return None
    words = head.splitlines()[0][2:].decode(errors="replace").split()
    if (found := BY_SHELL.search(head)) and words and words[0].endswith("sh"):
        return found[1].decode(errors="replace")
    if words and Path(words[0]).name == "env":
        words = [shutil.which(word) or word for word in words[1:] if not word.startswith("-")]
    return words[0] if words and PYTHON.fullmatch(Path(words[0]).name) else None


def is_this(python: str) -> bool:
    """Return whether `python` is the running interpreter, in the same environment."""
    try:
        same = os.path.samefile(python, sys.executable)
        return same and os.path.samefile(Path(python).parent, Path(sys.executable).parent)
    except OSError:
        return False


def _is_module(name: str) -> bool:
    """Return whether this Python finds a module, without importing its package, which may take long."""
    top, *rest = name.split(".")
    sys_path, sys.path = sys.path, [os.getcwd(), *sys.path]
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path = sys_path
    if spec is None or not rest:
        return spec is not None
    for place in spec.submodule_search_locations or ():
        inner = Path(place, *rest)
        if inner.with_suffix(".py").is_file() or (inner / "__main__.py").is_file():
            return True
    return False


# -- starting it


def start(program: Program, options: Options) -> int:
    """Run `program` and return 0. SystemExit and the like propagate; for other errors, print the traceback as Python
    does and exit with code 1."""
    console.STREAMS.restore()
    sys.excepthook = sys.__excepthook__  # typer has its own
    watch(options)
    if not getattr(sys.flags, "safe_path", False):
        here = Path(program.name).resolve().parent
        sys.path[0] = os.getcwd() if program.is_module else str(here)
    sys.argv = [program.name, *program.args]
    try:
        if program.is_module:
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.name, run_name="__main__")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "lm_eval":  # mlx-lm's extra
            raise UserError(
                f"[run] {program.name} needs lm-eval; got none here; pip install 'mlx-lm[evaluate]'"
            ) from None
        traceback = error.__traceback__  # without our frames
        while traceback is not None and traceback.tb_frame.f_code.co_filename in INSIDE:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(1)
    return 0
