"""Commands on a machine with something missing: no home, no temporary folder, closed streams, odd locales."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.attack.frame import PATIENCE, Attempt, command

CHAT = ("chat", "--prompt", "Hi", "--max-tokens", "4")


def attempts(short: bool) -> Iterator[Attempt]:
    with TemporaryDirectory() as name:
        base = Path(name)
        (base / "file").write_text("")
        (base / "closed").mkdir(mode=0o500)
        refused = {"TMPDIR=/nonexistent": {"TMPDIR": "/nonexistent"}}
        works = {"HOME is a file": {"HOME": str(base / "file"), "XDG_CACHE_HOME": ""}}
        if not short:
            refused |= {
                "TMPDIR is a file": {"TMPDIR": str(base / "file" / "x")},
                "TMPDIR has 5000 characters": {"TMPDIR": "/" + "a" * 5000},
            }
            works |= {
                "HOME=/nonexistent": {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""},
                "HOME=": {"HOME": "", "XDG_CACHE_HOME": ""},
                "the cache folder is a file": {"XDG_CACHE_HOME": str(base / "file")},
                "LANG=C": {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"},
                "LANG=xx": {"LANG": "xx_YY.nonsense", "LC_ALL": "xx_YY.nonsense"},
                "TERM=": {"TERM": ""},
                "COLUMNS=0": {"COLUMNS": "0"},
                "COLUMNS=x": {"COLUMNS": "x"},
                "PYTHONWARNINGS=error": {"PYTHONWARNINGS": "error::DeprecationWarning:mlxkv"},
                "MLXKV_KERNELS=x": {"MLXKV_KERNELS": "x"},
                "an empty PATH": {"PATH": ""},
            }
        for label, env in refused.items():
            for kv in ("int4",) if short else ("int4", "int2", "fp16"):
                ran = command(*CHAT, "--kv", kv, env=env)
                yield Attempt(f"{label}: chat --kv {kv}", ran.one_line, ran.note)
        for label, env in works.items():
            ran = command(*CHAT, env=env)
            held = ran.clean and (ran.code == 0 or ran.one_line)
            yield Attempt(f"{label}: chat", held, ran.note)
        if not short:
            yield from _streams()


def _streams() -> Iterator[Attempt]:
    """Closed or full streams, in a shell that closes them."""
    line = f"{sys.executable} -m mlxkv chat --prompt Hi --max-tokens 4"
    for label, end in {
        "stdin closed": "<&-",
        "stderr closed": "2>&-",
        "stdout is read no further": "| head -c 1",
        "stdin is a folder": "< /",
    }.items():
        done = subprocess.run(["sh", "-c", f"{line} {end}"], capture_output=True, timeout=PATIENCE)
        held = b"Traceback" not in done.stderr and b"MLXKV_TRACEBACK" not in done.stderr
        yield Attempt(label, held, done.stderr.decode(errors="replace")[-160:])
