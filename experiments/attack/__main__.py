"""Run the attacks and count what held: `python -m experiments.attack [AREA...]`.

With --out the page of counts is written; --short takes the part that CI runs. The exit code is 1 if an
attempt did not hold.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from experiments.attack.frame import Area, Attempt, areas, tried
from experiments.options import Parser, check_out
from mlxkv import console
from mlxkv.errors import MachineError, UserError
from mlxkv.machine import machine
from mlxkv.versions import versions

HEAD = """# Attacks

For whoever lets others reach a server, and for whoever reviews one.

What `mlxkv serve` and the commands do when somebody means harm, or a file is broken: each attempt is
judged by what a careful operator would expect. Servers run on loopback; nothing leaves the machine.

"""


def page(rows: list[tuple[Area, list[Attempt], float]], command: str) -> str:
    """The page of counts: a table of areas, and every attempt that did not hold."""
    tried = sum(len(attempts) for _, attempts, _ in rows)
    lost = [(area, one) for area, attempts, _ in rows for one in attempts if not one.held]
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    out = [
        f"{HEAD}{tried:,} attempts, {tried - len(lost):,} held, {len(lost)} did not.\n",
        "| area | what is tried | tried | held | s |\n|---|---|---:|---:|---:|",
    ]
    for area, attempts, seconds in rows:
        held = sum(one.held for one in attempts)
        out.append(f"| {area.name} | {area.title} | {len(attempts)} | {held} | {seconds:.0f} |")
    out.append("\n## What did not hold\n")
    out += [f"- {area.name}: {one.name}: {one.note}" for area, one in lost] or ["Nothing."]
    out.append(f"\nMade by `{command}` on {machine()['chip']}; {used}.\n")
    return "\n".join(out)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("attack", __doc__)
    add = parser.add_argument
    add("areas", nargs="*", help="names of areas; default: all")
    add("--short", action="store_true", help="the part that CI runs")
    add("--out", type=Path, help="write the page of counts here")
    args = parser.parse_args(arguments)
    check_out(args.out)
    there = {area.name: area for area in areas()}
    for name in args.areas:
        if name not in there:
            raise UserError(f"[attack] unknown area; got {name!r}; choose from {', '.join(there)}")
    rows = []
    for area in [there[name] for name in args.areas] or there.values():
        start = time.perf_counter()
        # In a process of its own: areas leave models attached, and handlers of signals.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            attempts = pool.submit(tried, area, args.short).result()
        for attempt in attempts:
            if not attempt.held:
                console.warn(f"{area.name}: {attempt.name}: {attempt.note}")
        seconds = time.perf_counter() - start
        rows.append((area, attempts, seconds))
        held = sum(one.held for one in attempts)
        console.note(f"{area.name}: {held} of {len(attempts)} held, {seconds:.0f} s")
    if args.out is not None:
        command = "python -m experiments.attack" + (" --short" if args.short else "")
        args.out.write_text(page(rows, " ".join([command, *args.areas])), encoding="utf-8")
    if lost := sum(not one.held for _, attempts, _ in rows for one in attempts):
        raise MachineError(f"[attack] {lost} attempts did not hold")


if __name__ == "__main__":
    console.run_tool(main)
