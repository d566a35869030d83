"""The options that `natural` and `selection` share, and the processes that measure."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from experiments.evidence import corpus, measure, work
from experiments.evidence.measure import OWN, Asked
from experiments.fixtures import QWEN, TINY
from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.names import parse_kv

ROWS = "rows.jsonl"
RESTARTS = 3
MISTAKE = 2  # exit code where options are wrong, which no second start mends
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
Presets = dict[str, list[str]]  # by model


def options(name: str, doc: str | None) -> Parser:
    """Return the options that `natural` and `selection` share."""
    parser = Parser(name, doc)
    add = parser.add_argument
    add("--models", type=words, required=True, help="folders or aliases, by commas")
    add("--texts", type=Path, help="folder of calibration, selection, test, haystack: KIND-N.txt")
    add("--out", type=Path, required=True, help="folder of results")
    windows = {"type": lambda text: text.split("+"), "default": ["64,64"]}
    add("--windows", help="SINK,RECENT, own or 64,64+own; default: 64,64", **windows)
    add("--context", default="4096", help="tokens, by commas: 2k,4k,8k")
    add("--decode", type=int, default=512, help="tokens after each context")
    add("--documents", type=int, default=8, help="of questions; 0: none")
    add("--document", default="8k", help="tokens of each")
    add("--questions", type=int, default=8, help="of one key, and of four, about each document")
    add("--dtype", help="float32, float16 or bfloat16; default: the model's")
    add("--minutes", type=float, help="stop after the text that is being read then")
    add("--shares", default="1/1", help="I/N: measure share I of N")
    add("--processes", type=int, default=1, help="at the same time, a share each")
    add("--gpus", type=int, default=0, help="spread the processes over so many NVIDIA GPUs")
    add("--keep", action="store_true", help="keep full precision's log probabilities on disk")
    return parser


def execute(
    args: argparse.Namespace, given: list[str], name: str, presets: Presets, splits: tuple
) -> tuple[int, int, int]:
    """Measure this share, or start a process for each. Return how many units were measured, failed and
    left; all are 0 if processes did it. presets: by model."""
    for preset in dict.fromkeys(one for names in presets.values() for one in names):
        parse_kv(preset)  # a mistake in the last name must not cost the work on the first
    asked, units = planned(args, presets, splits)
    if args.processes > 1:
        side_by_side(args, given, name)
        done = (0, 0, 0)
    else:
        which, of = work.parse_share(args.shares)
        mine = work.share(asked, units, which, of)
        seconds = None if args.minutes is None else 60 * args.minutes
        first = (which - 1) * max(1, len(asked.held.names(splits[0])) // of)
        done = work.run(asked, mine, presets, args.out / ROWS, seconds, first)
        console.note(
            f"share {args.shares}: {done[0]} measured, {done[1]} failed, {done[2]} left; {args.out / ROWS}"
        )
    if not args.keep and args.shares == "1/1":
        shutil.rmtree(args.out / measure.SCRATCH, ignore_errors=True)
    return done


def planned(args: argparse.Namespace, presets: Presets, splits: tuple) -> tuple[Asked, list]:
    """Return what is asked and all units. Raises UserError for what cannot be."""
    at_least("--decode", args.decode, 1)
    at_least("--questions", args.questions, 1)
    at_least("--processes", args.processes, 1)
    contexts = [console.parse_tokens(text, "--context") for text in words(args.context)]
    document = console.parse_tokens(args.document, "--document")
    for pair in args.windows:
        if pair != OWN and not all(part.isdigit() for part in pair.split(",", 1)):
            raise UserError(f"[--windows] not two numbers; got {pair!r}; write 64,64 or own")
    if args.texts is None and (others := [m for m in args.models if m not in (TINY, QWEN)]):
        raise UserError(f"[--texts] is needed for {others[0]}; got none; name the folder of texts")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"[--out] cannot make it; got {args.out}: {error.strerror}") from None
    asked = Asked(corpus.Held(args.texts), args.out, args.decode, args.questions, args.dtype)
    if args.texts is not None:
        asked.held.names(corpus.CALIBRATION)
    return asked, work.units(
        asked, presets, args.windows, splits, contexts, args.documents, document
    )


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
