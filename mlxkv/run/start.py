"""Start a program, in this process where its Python is this one."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from mlxkv import console
from mlxkv.errors import MachineError
from mlxkv.models.hosts import watch
from mlxkv.run.program import ELSEWHERE, MODULE, Program

SITE = Path(__file__).parent / "site"
INSIDE = {
    __file__,
    runpy.__file__,
    f"<frozen {runpy.__name__}>",
}  # files that no traceback has to show


def start(program: Program) -> int:
    """Run `program` to its end and return 0. What it raises is raised, SystemExit among it; a traceback is
    printed as Python does it, and ends the process with code 1."""
    paths = [str(SITE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))  # for what it starts
    console.as_they_were()
    if program.how == ELSEWHERE:
        return _replace(program)
    sys.excepthook = sys.__excepthook__  # typer has its own
    watch.start()
    try:
        _run(program)
    except Exception as error:
        error = error.with_traceback(_of_the_program(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    return 0


def _run(program: Program) -> None:
    module = program.how == MODULE
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if module else str(Path(program.name).resolve().parent)
    sys.argv = [program.name, *program.args]
    if module:
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program.name, run_name="__main__")


def _replace(program: Program) -> int:
    """Become `program`: its exit code, signals and streams are its own."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        os.execv(program.name, [program.name, *program.args])
    except OSError as error:
        raise MachineError(f"[run] {program.name} cannot be started: {error.strerror}") from None


def _of_the_program(traceback):
    """A traceback without the frames that started the program."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in INSIDE:
        traceback = traceback.tb_next
    return traceback
