"""Model folders with something wrong in them, and a process that loads many of them, one after another."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.attack.frame import PATIENCE, Attempt
from experiments.fixtures import QWEN, TINY
from mlxkv.console import one_line

SECONDS = 2.0  # of processor time, until a folder has to be refused
LOADER = (
    f"""
MODEL = {QWEN!r}"""
    + """
import json, sys, time
from mlxkv.errors import MachineError, UserError
from mlxkv.models import load
from mlxkv.chat.session import Session
load(MODEL, "int4")  # what is imported once is no part of a check
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, start = json.loads(line), time.process_time()
    try:
        session = Session(load(name, "int4"), max_tokens=2)
        seconds = time.process_time() - start
        said = "".join(session.ask("Hi, who are you and what can you do?"))
        end = ["replied", said]
    except UserError as error:
        end = ["refused", str(error)]
        seconds = time.process_time() - start
    except MachineError as error:
        end, seconds = ["failed", str(error)], 0.0
    except BaseException as error:
        end, seconds = ["raised", type(error).__name__ + ": " + str(error)[:200]], 0.0
    print(json.dumps([*end, seconds]), flush=True)
"""
)


@dataclass(frozen=True)
class Case:
    """A folder to load. names: what the line has to name, the file at fault. harmless: whether a reply is
    as good as a refusal."""

    name: str
    folder: Path
    names: str = ""
    harmless: bool = False


def whole(folder: Path, model: str = TINY) -> Path:
    """A copy of a model: links to its files, to be replaced."""
    folder.mkdir(parents=True)
    for file in Path(model).iterdir():
        if file.is_file() and "calibration" not in file.name:
            (folder / file.name).symlink_to(file)
    return folder


def replace(folder: Path, name: str, content: bytes | str | dict | list) -> None:
    """Put a file in place of a link."""
    (folder / name).unlink(missing_ok=True)
    if isinstance(content, dict | list):
        content = json.dumps(content)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def edit(folder: Path, name: str, **changes) -> None:
    """Change entries of a JSON file; None removes one."""
    data = json.loads((folder / name).read_text()) | changes
    replace(folder, name, {key: value for key, value in data.items() if value is not None})


def tried(cases: Iterable[Case]) -> Iterator[Attempt]:
    """Load each folder in one process; one that ends or hangs it is not held, and the next has a new one."""
    process = None
    for case in cases:
        if process is None:
            process = _started()
        yield _judged(case, _asked(process, str(case.folder)))
        if process.poll() is not None:
            _end(process)
            process = None
    if process is not None:
        _end(process)


def _started() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", LOADER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    process.stdout.readline()
    return process


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _asked(process: subprocess.Popen, folder: str) -> list | None:
    watch = threading.Timer(PATIENCE, process.kill)
    watch.start()
    try:
        process.stdin.write(json.dumps(folder) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    finally:
        watch.cancel()
    if not line:
        process.wait()
        return None
    return json.loads(line)


def _judged(case: Case, found: list | None) -> Attempt:
    if found is None:
        return Attempt(case.name, False, "the process hangs, or ended")
    end, text, seconds = found
    held = end == "replied" and case.harmless
    if end == "refused":
        line = text.startswith("[") and "\n" not in text and case.names in text
        held = line and seconds < SECONDS
    return Attempt(case.name, held, f"{end} after {seconds:.1f} s: {one_line(text)[:160]}")
