"""Run a completion's tests in a process of its own: `passes`."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from tempfile import TemporaryDirectory

SECONDS, MEMORY = 10.0, 2 << 30  # of wall time; bytes of address space
# Runs in the child. What it prints is thrown away; it ends well only if the word is written after the last test.
# An audit hook cannot be taken off again, and ends the process, which no `except` of the program survives.
GUARD = """
import os, resource, sys
word, program = sys.stdin.readline(), sys.stdin.read()
limits = {"AS": MEMORY, "CPU": SECONDS + 2, "FSIZE": 0, "CORE": 0, "NOFILE": 64}
for name, most in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(most),) * 2)
out, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "pty.", "signal.", "tempfile.")
HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv")  # imports do it
def refuse(event, args, end=os._exit):
    if event.startswith(REFUSED) and event not in HARMLESS or event == "open" and args[2] & WRITES:
        end(1)
sys.addaudithook(refuse)
exec(compile(program, "completion", "exec"), {"__name__": "completion"})
os.write(out, word.encode())
"""


def passes(program: str, seconds: float = SECONDS, memory: int = MEMORY) -> bool:
    """Return whether a Python program ends within the limits, without an error and without os._exit.

    It runs isolated (-I) in an empty folder, in a session of its own that is killed at the end; files that it writes,
    processes that it starts and connections end it. A guard against what models write, not against an attacker.
    """
    word = secrets.token_hex(16)
    guard = GUARD.replace("MEMORY", str(memory)).replace("SECONDS", str(seconds))
    with TemporaryDirectory() as place:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", guard],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=place,
            env={"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(f"{word}\n{program}".encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.communicate()
    return said.decode() == f"{word}\n"
