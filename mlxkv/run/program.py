"""Find what `mlxkv run` is to start, and by which Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from mlxkv.errors import UserError

HERE, MODULE, ELSEWHERE = "script", "module", "other"
PYTHON = re.compile(r"python[\d.]*(\.exe)?")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FIRST = 4096  # bytes of a script in which its interpreter is named
BY_SHELL = re.compile(rb"""^'''exec'\s+"?([^"\s]+)"?""", re.M)  # of pip and uv, for long paths
# Asked of another Python; "" would be the folder that is the current one.
KNOWS = """import sys
sys.path[:] = filter(None, sys.path)
from importlib.util import find_spec
sys.exit(not (find_spec('mlxkv') and find_spec('mlxkv.models') and find_spec('mlxkv.models.hosts')))
"""


@dataclass(frozen=True)
class Program:
    """What to start. how: HERE (a Python file, in this process), MODULE (in this process) or ELSEWHERE (by the
    system). name: of the file or module. args: what follows on its command line."""

    how: str
    name: str
    args: list[str]


def find(words: list[str]) -> Program:
    """The program that a command line names: as a shell finds it, else what lies beside this Python, else a
    module. Raises UserError."""
    if not words:
        raise UserError(
            "[run] no program; got nothing behind the options; write it like mlxkv run --kv int4 -- "
            "mlx_lm.generate --model MODEL"
        )
    first, *args = words
    if Path(first).name == "mlxkv":
        raise UserError("[run] mlxkv's own commands take --kv themselves; got mlxkv; leave run out")
    if first == "-m":
        if not args or not _is_module(args[0]):
            raise UserError(f"[run] no such module here; got {' '.join(words[:2])!r}")
        return Program(MODULE, args[0], args[1:])
    if first.endswith(".py") and Path(first).is_file():
        return Program(HERE, first, args)
    path = shutil.which(first)
    beside = Path(sys.executable).parent / first
    if path is not None:
        found = _of_path(path, args)
        if found is not None:
            return found
    if os.sep not in first and _is_file(beside):
        return Program(HERE, str(beside), args)
    if DOTTED.fullmatch(first) and _is_module(first):
        return Program(MODULE, first, args)
    if path is not None:
        raise UserError(
            f"[run] the Python of this program has no mlxkv of this version; got {path} by {interpreter(path)}; "
            f"install mlxkv there: {interpreter(path)} -m pip install mlxkv"
        )
    names = sorted(entry_points(group="console_scripts").names)
    close = get_close_matches(first, names, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(
        f"[run] no such program; got {first!r}; {hint}choose a command, python SCRIPT, SCRIPT.py, -m MODULE "
        "or a module's name"
    )


def _of_path(path: str, args: list[str]) -> Program | None:
    """The program at `path`; None where its Python has no mlxkv."""
    if PYTHON.fullmatch(Path(path).name):
        if not is_this(path):
            return Program(ELSEWHERE, path, args) if has_mlxkv(path) else None
        if args[:1] == ["-m"] and len(args) > 1 and _is_module(args[1]):
            return Program(MODULE, args[1], args[2:])
        if args and not args[0].startswith("-") and Path(args[0]).is_file():
            return Program(HERE, args[0], args[1:])
        return Program(ELSEWHERE, path, args)  # -c, or options of Python
    python = interpreter(path)
    if python is None:  # no Python, but it may start some
        return Program(ELSEWHERE, path, args)
    if is_this(python):
        return Program(HERE, path, args)
    return Program(ELSEWHERE, path, args) if has_mlxkv(python) else None


def interpreter(path: str) -> str | None:
    """The Python that a script names in its first lines, or None."""
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
    if not words or not PYTHON.fullmatch(Path(words[0]).name):
        return None
    if any(re.fullmatch(r"-\w*[IE]\w*", word) for word in words[1:]):
        raise UserError(
            f"[run] the first line of this program switches PYTHONPATH off; got {path}; run "
            f"{words[0]} -m mlxkv.hook install once, and then MLXKV=int4 {Path(path).name}"
        )
    return words[0]


def is_this(python: str) -> bool:
    """Return whether a path names the interpreter that runs now, with its packages."""
    try:
        same = os.path.samefile(python, sys.executable)
        return same and os.path.samefile(Path(python).parent, Path(sys.executable).parent)
    except OSError:
        return False


def has_mlxkv(python: str) -> bool:
    """Return whether another Python finds an mlxkv that can be asked for by MLXKV."""
    try:
        return subprocess.run([python, "-c", KNOWS], capture_output=True).returncode == 0
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    return path.is_file() and interpreter(str(path)) is not None


def _is_module(name: str) -> bool:
    """Return whether this Python finds a module. Its package is not imported, which may take long."""
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
