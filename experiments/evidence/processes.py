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


def side_by_side(args: argparse.Namespace, words: list[str], name: str) -> None:
    """Start the processes and wait for them. One that ends with an error is started again, RESTARTS times
    at most, since what is measured stays. Raises MachineError if an error remains."""
    # By share: the process, and which start it is.
    started: dict[int, tuple[subprocess.Popen, int]] = {}
    ended: dict[int, int] = {}
    try:
        for share in range(args.processes):
            started[share] = _start(args, words, name, share), 0
        while started:
            for share, (process, again) in list(started.items()):
                code = process.poll()
                if code is None:
                    continue
                if code in (0, MISTAKE) or again == RESTARTS:
                    ended[share] = code
                    del started[share]
                else:
                    console.note(f"share {share + 1}/{args.processes} ended with {code}; goes on")
                    started[share] = _start(args, words, name, share), again + 1
            time.sleep(0.1)
    finally:
        for process, _ in started.values():
            process.terminate()
    if failed := sum(map(bool, ended.values())):
        raise MachineError(
            f"[{name}] {failed} of {len(ended)} processes ended with an error; what "
            "the others measured is kept, and the same command goes on"
        )


def _start(args: argparse.Namespace, words: list[str], name: str, share: int) -> subprocess.Popen:
    extra = ["--processes", "1", "--shares", f"{share + 1}/{args.processes}"]
    env = dict(os.environ)
    for library in THREADS:  # else each takes all cores: calibrating on 32 took 150 s, not 35
        env.setdefault(library, "2")
    if args.gpus:
        env["CUDA_VISIBLE_DEVICES"] = str(share % args.gpus)
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.evidence.{name}", *words, *extra], env=env
    )


def parse_share(text: str) -> tuple[int, int]:
    """'2/16' -> (2, 16). Raises UserError."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise UserError(f"[--shares] not a share; got {text!r}; write I/N such as 1/16")
    return int(index), int(count)
