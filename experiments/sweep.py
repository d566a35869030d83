"""Time decode attention of many presets beside SDPA: `python -m experiments.sweep`.

Building kernels takes most of the time, so each worker process builds and checks one preset while
the others do the same. When all are ready, they are timed one after the other.
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

from experiments.options import Parser, at_least
from mlxkv import console
from mlxkv.bench.kernels import attend
from mlxkv.bench.kernels.case import parse_shape
from mlxkv.bench.subject import default_dtype
from mlxkv.errors import UserError
from mlxkv.formats.affine import Full
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.records import side_layout, why_no_record

COLUMNS = ("shape", "preset", "bits", "by", "us", "SDPA us", "ratio", "GB/s", "rms")
READY = "ready"
GB = 1e9  # bytes per second; a share of this bandwidth is a number of GB/s
DEFAULT_SHAPES = "B1.H32.G8.D128,B1.H16.G8.D64"


def alike(dims: int = 128) -> dict[str, list[str]]:
    """Group presets whose pages are the same to a kernel: the same layout of codes and numbers, and
    as many maps. Returns {first preset: all of its group}."""
    first: dict[tuple, str] = {}
    groups: dict[str, list[str]] = {}
    for name, config in PRESETS.items():
        sides = (config.keys, config.values)
        if any(isinstance(side.quantizer, Full) for side in sides):
            continue
        kind = []
        for i, side in enumerate(sides):
            form, stored = side.quantizer, side.dims(dims)
            if why_no_record(form, stored, config.page, i == 0) is None:
                form = side_layout(form, stored, config.page, i == 0)
            kind += [form, side.transform != "none"]
        groups.setdefault(first.setdefault(tuple(kind), name), []).append(name)
    return groups


def time_one(
    name: str, shape: str, tokens: int, calls: int, rounds: int, wait: Callable[[], None]
) -> dict:
    """Build, check, wait for the turn and time one preset, in a worker. Returns its row."""
    config, given = parse_kv(name), parse_shape(shape)
    row = {"preset": name, "shape": shape, "bits": config.bits_per_value(given.dims, given.dims)}
    if reason := config.why_not(given.dims, given.dims):
        return row | {"reason": reason}

    @contextmanager
    def turn() -> Iterator[None]:
        wait()
        yield

    (found,) = attend.rows(
        given,
        tokens,
        presets={name: config},
        dtype=default_dtype(),
        bandwidth=GB,
        calls=calls,
        rounds=rounds,
        with_mlx_lm=False,
        turn=turn(),
    )
    return row | found | {"reason": f"wrong: rms {found['rms']:.1e}" if found["wrong"] else None}


def _wait_for_parent() -> None:
    print(READY, flush=True)
    sys.stdin.readline()


def _wave(jobs: list[tuple[str, str]], args: argparse.Namespace) -> list[dict]:
    """Return the rows of `jobs`, (preset, shape), a worker for each. Their stderr is shown."""
    numbers = [str(n) for n in (args.tokens, args.calls, args.rounds)]
    command = [sys.executable, "-m", "experiments.sweep", "--one"]
    pipe, workers = subprocess.PIPE, []
    for job in jobs:
        one = [*command, *job, *numbers]
        workers.append(subprocess.Popen(one, stdin=pipe, stdout=pipe, text=True))
    said = [_line(worker) for worker in workers]  # READY, or a row with a reason
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
    """Return the next line that a worker of ours wrote; libraries may write to stdout too."""
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
    """Run the command. Returns 1 if a preset could not be timed."""
    parser = Parser("sweep", __doc__)
    add = parser.add_argument
    add("--kv", default="", help="presets, by commas; default: one of each kind of page")
    add("--shapes", default=DEFAULT_SHAPES, help="batch, heads, kv heads, dims; by commas")
    add("--context", default="32k", help="tokens in the cache")
    add("--calls", type=int, default=64, help="dependent calls in a chain")
    add("--rounds", type=int, default=3, help="times that each chain is timed")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes")
    add("--json", metavar="FILE", help="also write the rows to this file")
    add("--one", nargs=5, metavar="X", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        name, shape, tokens, calls, rounds = args.one
        row = time_one(name, shape, int(tokens), int(calls), int(rounds), _wait_for_parent)
        print(json.dumps(row), flush=True)
        return 0
    names = args.kv.split(",") if args.kv else list(alike())
    for option in ("calls", "rounds", "workers"):
        at_least(f"--{option}", getattr(args, option), 1)
    for shape in args.shapes.split(","):
        parse_shape(shape)
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
        if args.json:  # keep the rows so far if the run is stopped
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    _show(rows)
    if not args.kv:
        for name, others in alike().items():
            if len(others) > 1:
                print(f"the same kernels as {name}: {', '.join(others[1:])}")
    return 1 if any(r["reason"] for r in rows) else 0


if __name__ == "__main__":
    console.run_tool(main)
