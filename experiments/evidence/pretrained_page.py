"""Write the page of pretrained models: `python -m experiments.evidence.pretrained_page`.

It is made of the rows in FOLDER, NAME.jsonl or NAME.jsonl.gz, one file a model, with pictures beside them.
--keep NAME=FILE first stores the rows of a run of `evidence.pretrained` there, without what no page needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import floor, log10
from pathlib import Path
from statistics import median

from experiments.evidence import pretrained_picture as picture
from experiments.evidence.cells import OURS, PAPER, Cells, keep, machine, read
from experiments.options import Parser, words
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.intervals import Interval
from mlxkv.eval.report import markdown_table

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TITLES = {
    "smollm2": "SmolLM2 135M Instruct",
    "gemma-3-270m": "Gemma 3 270M",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder 0.5B Instruct",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder 1.5B Instruct",
}
SHAPES = {
    "smollm2": "Llama's family; 30 layers, 3 kv heads of 64, 8,192 positions; Q4_1",
    "gemma-3-270m": "18 layers, 3 of them with full attention, 1 kv head of 256, k-norm; Q4_K_M",
    "qwen2.5-coder-0.5b": "24 layers, 2 kv heads of 64, keys with a bias; Q4_K_M",
    "qwen2.5-coder-1.5b": "28 layers, 2 kv heads of 128, keys with a bias; Q4_K_M",
}
SHORT = {
    "smollm2": "SmolLM2",
    "gemma-3-270m": "Gemma",
    "qwen2.5-coder-0.5b": "Qwen",
    "qwen2.5-coder-1.5b": "Qwen 1.5B",
}
WORDS = {name: re.sub(r"\W", "", short.lower()) for name, short in SHORT.items()}  # in SAYS
FIGURE = re.compile(r"\{(\w+) ([\w.+-]+) (\d+)k(?: (\w+))?\}")
# Contexts that the page of the three models shows; rows hold them all.
SHOWN = (1024, 8192, 32768)
SAYS = (Path(__file__).parent / "pretrained_says.txt").read_text(encoding="utf-8")


def page(folder: Path, models: Mapping[str, Cells]) -> str:
    """Return the page: what it says, where it is of the kept models, then tables."""
    parts = ["# Pretrained models", ""]
    published = all(name in models for name in TITLES)
    if published:
        parts += [filled(SAYS, models).strip(), ""]
    parts += [f"![KL against bits per value]({folder.name}/{picture.BITS})", ""]
    parts += [f"![KL against context]({folder.name}/{picture.CONTEXTS})", ""]
    for name, cells in models.items():
        parts += [f"## {TITLES.get(name, name)}", "", _about(folder, cells), ""]
        contexts = [c for c in cells.contexts if c in SHOWN or not published]
        parts += [*_table(cells, contexts, likelihood=not published), ""]
        parts += _papers(cells)
    return "\n".join(parts).rstrip() + "\n"


def filled(text: str, models: Mapping[str, Cells]) -> str:
    """Put figures in place of {MODEL PRESET CONTEXTk WHAT}: KL, or `same`, `right`, `bits`, `limits`, `own`
    (KL with the method's own windows), `worst` (the largest of a text over the median)."""

    def figure(match: re.Match) -> str:
        short, preset, context, kind = match.groups()
        name = next(name for name, word in WORDS.items() if word == short)
        return _figure(models[name], preset, 1024 * int(context), kind)

    return FIGURE.sub(figure, text)


def _figure(cells: Cells, preset: str, context: int, kind: str | None) -> str:
    if kind == "right":
        return "{} of {}".format(*cells.answers(preset, context))
    if kind == "same":
        return f"{cells.same(preset, context):.1f}"
    if kind == "bits":
        return f"{cells.bits[preset]:.4g}"
    if kind == "worst":
        values = cells.values(preset, context)
        return f"{max(values) / median(values):.0f}"
    if kind == "own":
        return divergence(cells.kl(preset, context, PAPER).value)
    if kind == "limits":
        return divergence(cells.kl(preset, context))
    return divergence(cells.kl(preset, context).value)


def _about(folder: Path, cells: Cells) -> str:
    run = machine(folder, cells.name)
    device = run.get("machine", {}).get("device") or run.get("machine", {}).get("chip", "")
    versions = run.get("versions", {})
    used = ", ".join(f"{x} {versions[x]}" for x in ("mlxkv", "mlx", "mlx-lm") if x in versions)
    about = [SHAPES.get(cells.name), device, used]
    return ". ".join(filter(None, about)) + "."


def _table(cells: Cells, contexts: Sequence[int], likelihood: bool) -> list[str]:
    """Return one table: a row for each preset with our windows, KL by context."""
    contexts = [c for c in contexts if cells.presets(OURS, c)]
    counted = [c for c in contexts if cells.counted(c)]
    heads = ["preset", "bits", *(f"KL at {_k(c)} [95 %]" for c in contexts)]
    heads += [f"dNLL at {_k(c)} [95 %]" for c in contexts if likelihood]
    heads.append("same next token, %")
    if counted:
        heads.append(f"answers at {', '.join(map(_k, counted))}")
    presets = list(dict.fromkeys(p for c in contexts for p in cells.presets(OURS, c)))
    rows = []
    for preset in sorted(presets, key=lambda p: (-cells.bits[p], p)):
        places = [c if cells.measured(preset, c) else None for c in contexts]
        if preset == BASELINE:
            row = ["full precision", "16", *"0" * (len(places) * (1 + likelihood)), "100"]
        else:
            row = _start(cells, preset, contexts)
            if likelihood:
                row += [signed(cells.likelihood(preset, c)) if c else "–" for c in places]
            row.append(", ".join(f"{cells.same(preset, c):.1f}" if c else "–" for c in places))
        if counted:
            right = [cells.answers(preset, c) for c in counted]
            row.append(", ".join("/".join(map(str, x)) if x else "–" for x in right))
        rows.append(row)
    return [_measured(cells, contexts), "", *markdown_table(heads, rows)]


def _measured(cells: Cells, contexts: Sequence[int]) -> str:
    """Return texts, tokens before the ones that count and forms of question, by context."""
    clauses = []
    for context in contexts:
        texts = len(cells.values(cells.presets(OURS, context)[0], context))
        text = f"{_k(context)}: {texts} texts after {cells.lengths[context]:,} tokens"
        if counted := cells.counted(context):
            text += f", questions {', '.join(counted)}"
        elif cells.forms.get(context):
            best = 100 * max(cells.forms[context].values())
            text += f", no questions (full precision answers {best:.0f} % of its best form)"
        clauses.append(text)
    return "; ".join(clauses) + "."


def _start(cells: Cells, preset: str, contexts: Sequence[int], windows: str = OURS) -> list[str]:
    """Return the first cells of a row: the preset, its bits, KL by context."""
    found = [cells.measured(preset, c, windows) and cells.kl(preset, c, windows) for c in contexts]
    kl = [divergence(figure) if figure else "–" for figure in found]
    return [f"`{preset}`", f"{cells.bits[preset]:.2f}", *kl]


def _papers(cells: Cells) -> list[str]:
    """Return one table of the windows of each method's paper: KL by context."""
    contexts = [c for c in cells.contexts if cells.presets(PAPER, c)]
    if not contexts:
        return []
    presets = list(dict.fromkeys(p for c in contexts for p in cells.presets(PAPER, c)))
    heads = ["preset", "bits", *(f"KL at {_k(c)} [95 %]" for c in contexts)]
    heads.append(f"first and last 64 exact, {_k(contexts[-1])}")
    lines = ["### Each method's own windows", ""]
    lines += ["As their authors do, `naive-*` and `turbo-*` keep no token exact here.", ""]
    ours = {preset: divergence(cells.kl(preset, contexts[-1]).value) for preset in presets}
    rows = [[*_start(cells, preset, contexts, PAPER), ours[preset]] for preset in presets]
    return [*lines, *markdown_table(heads, rows), ""]


def _k(context: int) -> str:
    return f"{context // 1024}K" if context % 1024 == 0 else str(context)


def divergence(figure: Interval | float) -> str:
    """Format KL (nats) with two digits, in full, with its limits."""
    if isinstance(figure, Interval):
        text = divergence(figure.value)
        has_limits = figure.known and figure.value > 0
        return (
            f"{text} [{divergence(figure.low)}, {divergence(figure.high)}]" if has_limits else text
        )
    if figure < 1e-6:
        return "0"
    return f"{figure:.{min(6, max(2, 1 - floor(log10(figure))))}f}"


def signed(figure: Interval) -> str:
    """Format a difference with three places, with its limits."""
    text = f"{figure.value:+.3f}"
    return f"{text} [{figure.low:+.3f}, {figure.high:+.3f}]" if figure.known else text


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("evidence.pretrained_page", __doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=RESULTS / "pretrained", help="of rows and pictures")
    add("--out", type=Path, help="the page; default: FOLDER.md")
    add("--keep", type=words, default=(), help="NAME=FILE,...: rows of runs to store in FOLDER")
    args = parser.parse_args(arguments)
    for text in args.keep:
        name, _, file = text.partition("=")
        if not file or "/" in name:
            raise UserError(f"[--keep] not NAME=FILE; got {text!r}; write gemma=gemma.jsonl")
        console.note(f"kept {keep(Path(file), name, args.folder)}")
    models = {name: cells for name, cells in read(args.folder).items() if cells.texts}
    if not models:
        raise UserError(f"[--folder] no rows; got {args.folder}; run evidence.pretrained first")
    models = dict(sorted(models.items(), key=lambda x: (*TITLES, x[0]).index(x[0])))
    out = args.out or args.folder.with_suffix(".md")
    for name, text in picture.drawn(models, SHORT).items():
        (args.folder / name).write_text(text, encoding="utf-8")
    out.write_text(page(args.folder, models), encoding="utf-8")
    console.note(f"wrote {out}")


if __name__ == "__main__":
    console.run_tool(main)
