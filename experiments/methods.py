"""Compare every method on every model: `python -m experiments.methods --out FOLDER`.

Runs `mlxkv eval` once per model and kind of windows, several at the same time if asked to, and
writes the tables to FOLDER/methods.md and the picture to FOLDER/methods.svg. Results that FOLDER
already has are not computed again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments import collect
from experiments.ablation.collect import figure, percent
from experiments.fixtures import QWEN, TINY
from experiments.options import Parser, words
from mlxkv import console, plots
from mlxkv.errors import MachineError, UserError
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.report.pictures import SMALLEST
from mlxkv.formats.config import LEARNED
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS

EQUAL, OWN = "64,64", "own"
TASKS = "divergence,retrieval"
KINDS = ("single", "multi-query")  # of questions, in the order of a cell
COLUMNS = ("KL", "99 %", "one key / four")
NEAR_FULL = 10  # bits per value in pages; a preset with more has no row
OURS = "int"  # the family of int4, int3 and int2


def main(arguments: list[str] | None = None) -> None:
    args = _options(arguments)
    for name in args.kv:
        parse_kv(name)
    runs = [(windows, model) for windows in args.windows for model in args.models]
    if args.shares > 1:
        shares = [args.kv[i :: args.shares] for i in range(args.shares)]
        _all(args, [(*run, share) for run in runs for share in shares if share])
    _all(args, [(*run, args.kv) for run in runs])
    lines = []
    for windows in args.windows:
        reports = [collect.read(_folder(args, windows, model)) for model in args.models]
        if windows == args.windows[0]:
            context = max(reports[0]["contexts"])
            svg = picture(reports, context)
            (args.out / "methods.svg").write_text(svg, encoding="utf-8")
        lines += page(reports, windows)
    (args.out / "methods.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.note(str(args.out / "methods.md"))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("methods", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a folder for reports, page and picture")
    add(
        "--models",
        type=words,
        default=[TINY, QWEN],
        help="by commas; default: the small models of the tests",
    )
    add(
        "--kv",
        type=words,
        default=list(every()),
        help="presets by commas; default: all that compress",
    )
    add(
        "--windows",
        type=lambda text: text.split("+"),
        default=[EQUAL],
        help="64,64, own or 64,64+own",
    )
    add("--context", default="4k,8k", help="tokens, by commas")
    add("--decode", default="512", help="tokens decoded one by one after each context")
    add("--questions", default="16", help="of each kind and context")
    add("--side", type=int, default=1, help="processes at the same time")
    add("--shares", type=int, default=1, help="processes that share the presets of a model")
    args = parser.parse_args(arguments)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"[--out] cannot make the folder; got {args.out}: {error.strerror}"
        ) from None
    return args


def every() -> Iterator[str]:
    """Yield the presets that compress, without learned ones, which need a file of their own. Of
    presets that are the same, the last name counts, because it names the method."""
    last = {config: name for name, config in PRESETS.items()}
    for config, name in last.items():
        learned = LEARNED in (config.keys.transform, config.values.transform)
        if config.compresses and not learned and config.bits_per_value(128, 128) < NEAR_FULL:
            yield name


def _folder(args: argparse.Namespace, windows: str, model: str) -> Path:
    return args.out / f"{Path(model).name}-{windows.replace(',', '-')}"


def _all(args: argparse.Namespace, runs: list[tuple]) -> None:
    """Run the evaluations, `args.side` at a time. Raises MachineError if one fails."""
    with ThreadPoolExecutor(args.side) as pool:
        faults = list(pool.map(lambda run: _run(args, *run), runs))
    if fault := next(filter(None, faults), None):
        raise MachineError(f"[methods] {fault}")


def _run(args: argparse.Namespace, windows: str, model: str, presets: list[str]) -> str | None:
    """Run one `mlxkv eval`; return the error or None. All runs of a model share one folder."""
    command = [sys.executable, "-m", "mlxkv", "eval", "--model", model, "--windows", windows]
    command += ["--kv", ",".join(presets), "--tasks", TASKS, "--context", args.context]
    command += ["--decode", args.decode, "--questions", args.questions, "--kinds", ",".join(KINDS)]
    command += ["--out", str(_folder(args, windows, model)), "--jobs", "1"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        return f"{model}, windows {windows}: {last}"
    console.note(f"{model}, windows {windows}: {len(presets)} presets")
    return None


def page(reports: list[dict], windows: str) -> list[str]:
    """Return Markdown: for each context a table with a row per preset and columns per model."""
    lines = []
    for context in reports[0]["contexts"]:
        of_each = "each method's own" if windows == OWN else f"{windows} tokens"
        lines += [f"## {context} tokens, windows: {of_each}", "", *table(reports, context), ""]
    return lines


def table(reports: list[dict], context: int) -> list[str]:
    """Return the table, most bits first. A cell that a report has no number for stays empty."""
    rows = [data["rows"][str(context)] for data in reports]
    bits: dict[str, list[float]] = {}
    for by_name in rows:
        for name, row in by_name.items():
            bits.setdefault(name, []).append(row["bits_per_value"])
    heads = ["preset", "bits", *(f"{d['model']}: {c}" for d in reports for c in COLUMNS)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in sorted(bits, key=lambda name: -max(bits[name])):
        cells = [name, _bits(bits[name])]
        for by_name in rows:
            cells += _cells(by_name.get(name, {}))
        lines.append(_line(cells))
    return lines


def _cells(row: dict) -> list[str]:
    found = row.get("retrieval", {})
    keys = [percent(found[kind]) if kind in found else "" for kind in KINDS]
    numbers = [figure(row[key]) if key in row else "" for key in ("kl_mean", "kl_p99")]
    return [*numbers, " / ".join(keys) if any(keys) else ""]


def _bits(found: list[float]) -> str:
    """Format bits per value; a range if models with other head dims have other bits."""
    low, high = (f"{x:.2f}" for x in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


Row = dict[str, float]


def _found(row: Row) -> float:
    """Return the share of values found, in percent, mean of the kinds of questions."""
    found = row["retrieval"].values()
    return 100 * sum(found) / len(found)


MEASURES: dict[str, Callable[[Row], float]] = {
    "mean KL (nats)": lambda row: max(row["kl_mean"], SMALLEST),
    "99 % KL (nats)": lambda row: max(row["kl_p99"], SMALLEST),
    "facts found (%)": _found,
}


def family(name: str) -> str:
    """Return the method of a preset: kvarn-int2+fixed -> kvarn, turbo-2.5 -> turbo, int4 -> int,
    polar-tree+online -> polar-tree, fill-2.25 -> fill."""
    plain = name.split("+")[0]
    return re.sub(r"-?(int\d|k\dv\d|\d+(\.\d+)?)$", "", plain) or OURS


def frontier(points: list[tuple[float, float]], rises: bool) -> list[tuple[float, float]]:
    """Return the (bits, measure) points that no point with as few bits beats, by bits."""
    best: list[tuple[float, float]] = []
    sign = -1 if rises else 1
    for bits, value in sorted(points, key=lambda p: (p[0], sign * p[1])):
        if not best or sign * value < sign * best[-1][1]:
            best.append((bits, value))
    return best


def picture(reports: list[dict], context: int) -> str:
    """Draw a column per report and a row per measure; return SVG text. Points are presets; a line
    joins the frontier of each family."""
    with plots.pyplot() as plt:
        size = (3.4 * len(reports), 3.0 * len(MEASURES))
        figure, axes = plt.subplots(
            len(MEASURES), len(reports), figsize=size, sharex=True, sharey="row", squeeze=False
        )
        tables = [data["rows"][str(context)] for data in reports]
        families = list(dict.fromkeys(family(n) for rows in tables for n in rows if n != BASELINE))
        for column, (data, rows) in enumerate(zip(reports, tables, strict=True)):
            axes[0, column].set_title(f"{data['model']}, {context} tokens")
            axes[-1, column].set_xlabel("bits per value in pages")
            for axis, (label, measure) in zip(axes[:, column], MEASURES.items(), strict=True):
                rises = measure is _found
                axis.set_yscale("linear" if rises else "log")
                if not column:
                    axis.set_ylabel(label)
                for index, one in enumerate(families):
                    _family(axis, one, index, rows, measure, rises)
        handles, names = axes[0, 0].get_legend_handles_labels()
        axes[0, -1].legend(handles, names, loc="upper left", bbox_to_anchor=(1.02, 1))
        figure.tight_layout()
        return plots.svg(figure)


def _family(axis, one: str, index: int, rows: dict, measure, rises: bool) -> None:
    points = [
        (row["bits_per_value"], measure(row))
        for name, row in rows.items()
        if name != BASELINE and family(name) == one and ("retrieval" in row or not rises)
    ]
    ours = one == OURS
    style = {
        "color": "black" if ours else f"C{index % 10}",
        "marker": "*" if ours else "os^vDPX<>ph"[index % 11],
        "markersize": 11 if ours else 5,
        "zorder": 4 if ours else 3,
    }
    label = "int4, int3, int2" if ours else one
    if points:
        axis.plot(*zip(*points, strict=True), linestyle="", alpha=0.85, label=label, **style)
        best = frontier(points, rises)
        axis.plot(*zip(*best, strict=True), color=style["color"], linewidth=1, alpha=0.6)


if __name__ == "__main__":
    console.run_tool(main)
