"""See whether a share of next tokens is kept: `python -m experiments.evidence.agreement MODEL... -o ROWS`.

`mlxkv.load(MODEL, "99%")` chooses a preset for each of --bounds on its own texts; then that preset and its neighbours
on the dial are measured on twelve texts on which nothing was chosen, at each context. --table prints the rows: what was
chosen, what was reached, texts below the bound, and the fewest bits that would have kept it on these twelve. ROWS gets
JSON lines, appended as they come; the same command goes on where it was stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.evidence.texts import DOCUMENTS, MANUAL, READ, Texts
from experiments.options import Parser, words
from mlxkv import console, startup
from mlxkv.calibration.fitting import find_calibration
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.formats.agreement import Measured, bits_of
from mlxkv.formats.names import bound_of
from mlxkv.loading.agreement import NEXT, Readings, choose, dial_of
from mlxkv.loading.load import load

HELD = (MANUAL, *READ, *(f"document-{i + 1}" for i in range(DOCUMENTS)))[:12]
BELOW, ABOVE = 3, 1  # places on the dial around a choice that are measured, too
LOST = 20  # one text in so many may be below a bound


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    if args.table:
        return print(table(read(args.output)))
    for bound in args.bounds:
        if bound_of(bound) is None:
            raise UserError(f"[--bounds] no share; got {bound!r}; write 99%")
    names = HELD if args.held is None else sorted(x.stem for x in args.held.glob("*.txt"))
    if not names:
        raise UserError(f"[--held] no .txt file; got {args.held}; name a folder of texts")
    texts = Texts(args.held or args.texts or args.output.parent / "texts")
    if args.held is None:
        texts.make()
    for model in args.models:
        _measure(args, model, texts, names)


def _measure(args, model: str, texts: Texts, names: Sequence[str]) -> None:
    startup.whole_float32()
    loaded = load(model, "fp16", dtype=args.dtype, calibration=args.calibration)
    name = Path(model).name.removesuffix(".gguf")
    done, bits = read(args.output), {}
    dial, _ = dial_of(loaded, find_calibration(loaded.model))
    with args.output.open("a", encoding="utf-8") as file:

        def write(row: dict) -> None:
            print(json.dumps({"model": name} | row), file=file, flush=True)

        for bound in args.bounds:
            start, processor = time.perf_counter(), time.process_time()
            choice = choose(loaded, bound)
            spent = time.perf_counter() - start, time.process_time() - processor
            console.note(f"{name}: {choice.line}")
            if not any(x["model"] == name and x.get("bound") == choice.bound for x in done):
                numbers = dict(
                    zip(("seconds", "processor"), (round(x, 1) for x in spent), strict=True)
                )
                write(asdict(choice) | numbers)
            bits[bound] = choice.preset
        known = {(x["context"], x["preset"]) for x in done if x["model"] == name and "texts" in x}
        for context in (console.parse_tokens(x, "--contexts") for x in args.contexts):
            length = min(context, (loaded.context or context) - NEXT)
            due = [x for x in around(dial, bits.values()) if (context, x) not in known]
            if not due:
                continue
            found = {held: texts.tokens(loaded, held, length + NEXT) for held in names}
            kept = {held: tokens for held, tokens in found.items() if tokens is not None}
            readings = Readings(loaded, length, NEXT)
            steps = len(kept) * (length + NEXT * (1 + len(due)))
            with console.progress(f"{name} {context}", steps) as count:
                readings.read(kept.values(), count)
                for preset in due:
                    same = readings.measured(preset, count).same
                    about = {"context": context, "length": length, "preset": preset, "tokens": NEXT}
                    write(about | {"texts": dict(zip(kept, same, strict=True))})


def around(dial: Sequence[str], chosen: Iterable[str]) -> list[str]:
    """Return the presets of the dial near those that were chosen, the fewest bits first."""
    places = [dial.index(x) if x in dial else len(dial) for x in chosen]  # else fp16
    near = {i for at in places for i in range(max(0, at - BELOW), min(len(dial), at + ABOVE + 1))}
    return [dial[i] for i in sorted(near)]


def table(rows: Sequence[dict]) -> str:
    """Return the rows as two tables in Markdown: what was chosen, and what it keeps on the twelve texts."""
    choices = [x for x in rows if "bound" in x]
    out = [_table("model | asked | chosen | at 1K, % | 19 texts of 20 | longest | there, % | s")]
    for x in choices:
        short, long = (x[key] and Measured(**x[key]) for key in ("short", "long"))
        near = f"{100 * short.mean:.2f} | {100 * short.low():.2f}" if short else " | "
        far = f"{long.context:,} | {100 * long.mean:.2f}" if long else " | "
        cells = f"{x['model']} | {100 * x['bound']:g}% | `{x['preset']}` | {near} | {far}"
        out.append(f"| {cells} | {x['seconds']:.0f} |")
    held = [x for x in rows if "texts" in x]
    lines = []
    for x in choices:
        for context in sorted({row["context"] for row in held if row["model"] == x["model"]}):
            of = {
                row["preset"]: [n / row["tokens"] for n in row["texts"].values()]
                for row in held
                if row["model"] == x["model"] and row["context"] == context
            }
            if x["preset"] in of:
                lines.append(_held(x, context, of))
    if lines:
        head = "model | asked | chosen | context | same next token, % | least of a text | below | enough"
        out += ["", _table(head), *lines, "", summary(rows)]
    return "\n".join(out)


def summary(rows: Sequence[dict]) -> str:
    """Return how many readings of the chosen presets are below, with 95 % over texts; by share and by model; and how
    many are below the limit that was said at the short context."""
    below: dict[str, list[bool]] = {}
    parts: dict[str, list[bool]] = {}
    limits: list[bool] = []
    for x in (x for x in rows if "bound" in x):
        of = [y for y in rows if "texts" in y and all(x[k] == y[k] for k in ("model", "preset"))]
        for y in of:
            for text, same in y["texts"].items():
                low = same < x["bound"] * y["tokens"]
                for part in (f"{100 * x['bound']:g}%", x["model"]):
                    parts.setdefault(part, []).append(low)
                below.setdefault(text, []).append(low)
                if x["short"] and y["context"] == x["short"]["context"]:
                    limits.append(same < Measured(**x["short"]).low() * y["tokens"])
    each = [low for lows in below.values() for low in lows]
    found = intervals.share([sum(lows) / len(lows) for lows in below.values()])
    whole = f"{sum(each)} of {len(each)} readings are below, {100 * found.value:.1f} %"
    if found.known:
        least, most = found.limits
        whole += f" [{100 * max(0, least):.1f}, {100 * most:.1f}] over texts"
    by = ", ".join(f"{part} {sum(lows)} of {len(lows)}" for part, lows in parts.items())
    return (
        f"{whole}: {by}. Below the limit said at the short context: {sum(limits)} of {len(limits)}."
    )


def _table(head: str) -> str:
    return f"| {head} |\n| {' | '.join('---' for _ in head.split('|'))} |"


def _held(choice: dict, context: int, of: dict[str, list[float]]) -> str:
    bound, shares = choice["bound"], of[choice["preset"]]
    below = f"{sum(x < bound for x in shares)} of {len(shares)}"
    cells = f"{100 * sum(shares) / len(shares):.2f} | {100 * min(shares):.1f} | {below}"
    asked = f"{choice['model']} | {100 * bound:g}% | `{choice['preset']}` | {context:,}"
    return f"| {asked} | {cells} | `{next(_fewest(of, bound), 'none of them')}` |"


def _fewest(of: dict[str, list[float]], bound: float) -> Iterator[str]:
    """Yield the presets that at most one text in LOST is below, the fewest bits first."""
    order = sorted(of, key=bits_of)
    yield from (x for x in order if sum(s < bound for s in of[x]) * LOST <= len(of[x]))


def read(path: Path) -> list[dict]:
    """Return the rows of a file, none if it is missing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _parser() -> Parser:
    parser = Parser("evidence.agreement", __doc__)
    add = parser.add_argument
    add("models", nargs="*", help="names, files or folders")
    add("--bounds", type=words, default=("99%", "97%"), help="shares by commas")
    add("--contexts", type=words, default=("1k", "8k", "32k"), help="tokens by commas")
    add("--output", "-o", type=Path, default=Path("runs/agreement.jsonl"), help="rows")
    add("--texts", type=Path, help="folder of texts; default: beside ROWS, made there")
    add("--held", type=Path, help="a folder of texts (.txt) of your own, in place of the twelve")
    add("--calibration", type=Path, help="default: the model's own")
    add("--dtype", default="float32", help="float32, float16 or bfloat16")
    add("--table", action="store_true", help="print the rows as Markdown, measure nothing")
    return parser


if __name__ == "__main__":
    console.run_tool(main)
