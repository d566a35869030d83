"""Every method on every model, as one page: `python -m mlxkv.eval.methods --out FOLDER`.

Runs `mlxkv eval` once per model and kind of windows, some of them side by side, and writes
FOLDER/methods.md with its picture. What is in FOLDER already is not computed again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlxkv import console
from mlxkv.config import LEARNED, parse_kv
from mlxkv.errors import MachineError, UserError
from mlxkv.eval import collect
from mlxkv.eval.ablation.collect import figure, percent
from mlxkv.models.aliases import EMBEDDED
from mlxkv.presets import PRESETS

EQUAL, OWN = "64,64", "own"
TASKS = "divergence,retrieval"
KINDS = ("single", "multi-query")  # of questions: what a cell shows
COLUMNS = ("KL", "99 %", "one key / four")
NEAR_FULL = 10  # bits per value in pages above which a preset is no compression worth a row


def main(arguments: list[str] | None = None) -> None:
    args = _options(arguments)
    for name in args.kv:
        parse_kv(name)
    runs = [(windows, model) for windows in args.windows for model in args.models]
    if args.shares > 1:
        shares = [args.kv[i :: args.shares] for i in range(args.shares)]
        _all(args, [(*run, share) for run in runs for share in shares if share])
    _all(args, [(*run, args.kv) for run in runs])
    from mlxkv.eval import overview  # matplotlib

    lines = []
    for windows in args.windows:
        reports = [collect.read(_folder(args, windows, model)) for model in args.models]
        if windows == args.windows[0]:
            context = max(reports[0]["contexts"])
            svg = overview.overview(reports, context)
            (args.out / "methods.svg").write_text(svg, encoding="utf-8")
        lines += page(reports, windows)
    (args.out / "methods.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.note(str(args.out / "methods.md"))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a folder for reports, page and picture")
    add("--models", type=_list, default=list(EMBEDDED), help="by commas; the embedded ones")
    add("--kv", type=_list, default=list(every()), help="presets by commas; all")
    add(
        "--windows",
        type=lambda text: text.split("+"),
        default=[EQUAL],
        help="64,64 or own or 64,64+own",
    )
    add("--context", default="4k,8k", help="tokens, by commas")
    add("--decode", default="512", help="tokens decoded one by one behind each context")
    add("--questions", default="16", help="of each kind and context")
    add("--side", type=int, default=1, help="processes side by side")
    add("--shares", type=int, default=1, help="processes that share the presets of a model")
    args = parser.parse_args(arguments)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"[--out] cannot make the folder; got {args.out}: {error.strerror}"
        ) from None
    return args


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def every() -> Iterator[str]:
    """The presets that compress, and that every model has: learned ones need a file of their own.
    Of those that are the same the last, which names the method."""
    last = {config: name for name, config in PRESETS.items()}
    for config, name in last.items():
        learned = LEARNED in (config.keys.transform, config.values.transform)
        if config.compresses and not learned and config.bits_per_value(128, 128) < NEAR_FULL:
            yield name


def _folder(args: argparse.Namespace, windows: str, model: str) -> Path:
    return args.out / f"{Path(model).name}-{windows.replace(',', '-')}"


def _all(args: argparse.Namespace, runs: list[tuple]) -> None:
    """Raises MachineError if one of them fails."""
    with ThreadPoolExecutor(args.side) as pool:
        faults = list(pool.map(lambda run: _run(args, *run), runs))
    if fault := next(filter(None, faults), None):
        raise MachineError(f"[methods] {fault}")


def _run(args: argparse.Namespace, windows: str, model: str, presets: list[str]) -> str | None:
    """One `mlxkv eval`; what went wrong, or None. All of a model keep their results in one folder."""
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
    """Lines of Markdown: for each context a table with a row per preset and columns per model."""
    lines = []
    for context in reports[0]["contexts"]:
        of_each = "each method's own" if windows == OWN else f"{windows} tokens"
        lines += [f"## {context} tokens, windows: {of_each}", "", *table(reports, context), ""]
    return lines


def table(reports: list[dict], context: int) -> list[str]:
    """Most bits first, full precision above all. What a report lacks stays empty."""
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
    """Of models whose head dims differ, the range."""
    low, high = (f"{x:.2f}" for x in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    console.run_tool(main)
