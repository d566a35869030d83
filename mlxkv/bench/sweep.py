"""Decode attention of many presets beside SDPA: `python -m mlxkv.bench.sweep`.

Building kernels takes most of the time, so as many presets as there are workers build and check theirs
side by side, each in a process of its own; when all are done they are timed one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxkv import console, records
from mlxkv.config import parse_kv
from mlxkv.errors import UserError
from mlxkv.formats import Full
from mlxkv.presets import PRESETS

COLUMNS = ("shape", "preset", "bits", "by", "us", "SDPA us", "ratio", "GB/s", "rms")
READY = "ready"
GB = 1e9  # bytes per second: against such a memory a share of its bandwidth is a number of GB/s
DEFAULT_SHAPES = "B1.H32.G8.D128,B1.H16.G8.D64"


def alike(dims: int = 128) -> dict[str, list[str]]:
    """Presets by the first of those whose pages are the same to a kernel: codes and numbers of one
    layout, and as many maps. What the maps and numbers are costs no time."""
    first: dict[tuple, str] = {}
    groups: dict[str, list[str]] = {}
    for name, config in PRESETS.items():
        sides = (config.keys, config.values)
        if any(isinstance(side.quantizer, Full) for side in sides):
            continue
        kind = []
        for i, side in enumerate(sides):
            form, stored = side.quantizer, side.dims(dims)
            if records.why_not(form, stored, config.page, i == 0) is None:
                form = records.layout(form, stored, config.page, i == 0)
            kind += [form, side.transform != "none"]
        groups.setdefault(first.setdefault(tuple(kind), name), []).append(name)
    return groups


def time_one(
    name: str, shape: str, tokens: int, calls: int, rounds: int, wait: Callable[[], None]
) -> dict:
    """In a worker: build, check, wait for the turn, time."""
    from mlxkv.bench import attend
    from mlxkv.bench.case import parse_shape
    from mlxkv.bench.timing import default_dtype

    config, given = parse_kv(name), parse_shape(shape)
    row = {"preset": name, "shape": shape, "bits": config.bits_per_value(given.dims, given.dims)}
    if reason := config.why_not(given.dims, given.dims):
        return row | {"reason": reason}

    @contextmanager
    def turn() -> Iterator[None]:
        wait()
        yield

    (found,) = attend.rows(
        *(given, tokens, {name: config}, default_dtype(), GB, calls, rounds, False), turn=turn()
    )
    return row | found | {"reason": f"wrong: rms {found['rms']:.1e}" if found["wrong"] else None}


def _wait_for_parent() -> None:
    print(READY, flush=True)
    sys.stdin.readline()


def _wave(jobs: list[tuple[str, str]], args: argparse.Namespace) -> list[dict]:
    """Rows of so many workers. What one of them writes to stderr is shown as it comes."""
    numbers = [str(n) for n in (args.tokens, args.calls, args.rounds)]
    command = [sys.executable, "-m", "mlxkv.bench.sweep", "--one"]
    pipe, workers = subprocess.PIPE, []
    for job in jobs:
        one = [*command, *job, *numbers]
        workers.append(subprocess.Popen(one, stdin=pipe, stdout=pipe, text=True))
    said = [_line(worker) for worker in workers]  # ready, or a row that says why not
    rows = []
    for (name, shape), worker, text in zip(jobs, workers, said, strict=True):
        if text == READY:
            worker.stdin.write("go\n")
            worker.stdin.flush()
            text = _line(worker)
        worker.communicate()
        failed = {"preset": name, "shape": shape, "bits": None, "reason": "its process failed"}
        rows.append(json.loads(text) if text else failed)
    return rows


def _line(worker: subprocess.Popen) -> str:
    """The next line that is ours: a library may write there, too."""
    for text in worker.stdout:
        if text.strip() == READY or text.startswith("{"):
            return text.strip()
    return ""


def _show(rows: list[dict]) -> None:
    table = []
    for r in rows:
        start = (r["shape"], r["preset"], f"{r['bits']:.2f}" if r["bits"] else "-")
        if r["reason"]:
            table.append((*start, r["reason"], *["-"] * 5))
            continue
        numbers = (f"{r['us']:.1f}", f"{r['sdpa_us']:.1f}", f"{r['ratio']:.2f}")
        table.append((*start, r["by"], *numbers, f"{r['of_floor']:.0f}", f"{r['rms']:.1e}"))
    console.print_table(COLUMNS, table)
    timed = [r for r in rows if not r["reason"]]
    slow = [f"{r['preset']} ({r['shape']})" for r in timed if r["ratio"] < 1]
    print(f"{len(timed)} of {len(rows)} timed; slower than SDPA: {', '.join(slow) or 'none'}")


def main(argv: list[str] | None = None) -> int:
    """The command. Returns 1 where a preset could not be timed."""
    parser = argparse.ArgumentParser(prog="python -m mlxkv.bench.sweep", description=__doc__)
    parser.add_argument("--kv", default="", help="presets by commas; default: one of each kind")
    parser.add_argument("--shapes", default=DEFAULT_SHAPES)
    parser.add_argument("--context", default="32k")
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    parser.add_argument("--one", nargs=5, metavar="X", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        name, shape, tokens, calls, rounds = args.one
        row = time_one(name, shape, int(tokens), int(calls), int(rounds), _wait_for_parent)
        print(json.dumps(row), flush=True)
        return 0
    names = args.kv.split(",") if args.kv else list(alike())
    args.tokens = console.parse_tokens(args.context, "--context")
    least = max(parse_kv(name).window for name in names) + 1
    if args.tokens < least:
        raise UserError(
            f"[--context] nothing is compressed in so few tokens; got {args.tokens}; choose at "
            f"least {least}"
        )
    jobs = [(name, shape) for shape in args.shapes.split(",") for name in names]
    rows = []
    for start in range(0, len(jobs), args.workers):
        rows += _wave(jobs[start : start + args.workers], args)
        print(f"{len(rows)} of {len(jobs)}", file=sys.stderr, flush=True)
        if args.json:  # what is done stays, whatever comes
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    _show(rows)
    if not args.kv:
        for name, others in alike().items():
            if len(others) > 1:
                print(f"the same kernels as {name}: {', '.join(others[1:])}")
    return 1 if any(r["reason"] for r in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
