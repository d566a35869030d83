"""Measure in several processes, each with a share of the texts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from mlxkv import console
from mlxkv.errors import MachineError, UserError

RESTARTS = 3
MISTAKE = 2  # exit code where options are wrong, which no second start mends
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def side_by_side(args: argparse.Namespace, given: list[str], name: str) -> None:
    """Start the processes and wait for them. One that ends with an error is started again, RESTARTS times
    at most, since what is measured stays. Raises MachineError if an error remains."""
    # By share: the process, and which start it is.
    started: dict[int, tuple[subprocess.Popen, int]] = {}
    ended: dict[int, int] = {}
    try:
        for which in range(args.processes):
            started[which] = _start(args, given, name, which), 0
        while started:
            for which, (process, again) in list(started.items()):
                code = process.poll()
                if code is None:
                    continue
                if code in (0, MISTAKE) or again == RESTARTS:
                    ended[which] = code
                    del started[which]
                else:
                    console.note(f"share {which + 1}/{args.processes} ended with {code}; goes on")
                    started[which] = _start(args, given, name, which), again + 1
            time.sleep(0.1)
    finally:
        for process, _ in started.values():
            process.terminate()
    if failed := sum(map(bool, ended.values())):
        raise MachineError(
            f"[{name}] {failed} of {len(ended)} processes ended with an error; what "
            "the others measured is kept, and the same command goes on"
        )


def _start(args: argparse.Namespace, given: list[str], name: str, which: int) -> subprocess.Popen:
    extra = ["--processes", "1", "--shares", f"{which + 1}/{args.processes}"]
    env = dict(os.environ)
    for library in THREADS:  # else each takes all cores: calibrating on 32 took 150 s, not 35
        env.setdefault(library, "2")
    if args.gpus:
        env["CUDA_VISIBLE_DEVICES"] = str(which % args.gpus)
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.evidence.{name}", *given, *extra], env=env
    )


def parse_share(text: str) -> tuple[int, int]:
    """'2/16' -> (2, 16). Raises UserError."""
    which, _, of = text.partition("/")
    if not (which.isdigit() and of.isdigit() and 1 <= int(which) <= int(of)):
        raise UserError(f"[--shares] not a share; got {text!r}; write I/N such as 1/16")
    return int(which), int(of)
