"""Write docs/results/papers.md from rows: `python -m experiments.papers.page`.

`papers_page.txt` beside this file is the page with Python between braces: calls of the functions of `Figures`, whose
results are figures of docs/results/papers/PAPER-MODEL.jsonl.gz, and of the rows by MLX in docs/results/pretrained as
tasks such as "real 4k", or "real paper 4k" with each method's own windows. --keep FOLDER first stores the rows of a
run, FOLDER/PAPER/MODEL.jsonl each, without what the page does not need. A picture a paper is drawn from them.
A text counts once all variants of its task have a row; a model has figures of a task from LEAST such texts on.

Beside them lie codes.jsonl (`experiments.codes_by_triton`), encode.json and, of a GPU's machine, encode-h200.json
(`experiments.papers.encode --out`).
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from math import floor, log10
from pathlib import Path

import numpy as np

from experiments.evidence.cells import OURS, Cells
from experiments.evidence.cells import read as read_real
from experiments.options import Parser
from experiments.papers.ratios import cells, markdown, more_perplexity
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval import intervals, plots
from mlxkv.eval.rows import Row, read
from mlxkv.formats.matrices import gaussian
from mlxkv.spec import oscar

ROOT = Path(__file__).parents[2]
TEMPLATE = Path(__file__).parent / "papers_page.txt"
PAGE = ROOT / "docs" / "results" / "papers.md"
ROWS = PAGE.parent / "papers"
MODELS = {
    "SmolLM2-135M-Instruct": "SmolLM2",
    "gemma-3-270m": "Gemma",
    "Qwen2.5-Coder-0.5B-Instruct": "Qwen",
    "Qwen2.5-Coder-1.5B-Instruct": "Qwen 1.5B",
}
NOT_KEPT = {"state", "dtype", "decode", "seed", "versions", "kl_p99", "completion"}
LEAST = 6  # texts of a model that are enough for a figure
ONCE = {"srft.error"}  # tasks with a row a variant, not a text
VALUES = 2 * 8 * 128  # of a token, in codes.jsonl: keys and values, kv heads, dims
DIGITS = 5  # of a number of a row
CALL = re.compile(r"\{([^{}]+)\}")
COLOURS = ("#0b5cad", "#15803d", "#c2410c", "#7c3aed")
Texts = dict[str, Row]


def keep(folder: Path, to: Path = ROWS) -> None:
    """Store the rows of FOLDER/PAPER/MODEL.jsonl as PAPER-MODEL.jsonl.gz. Raises UserError."""
    files = sorted(folder.glob("*/*.jsonl"))
    if not files:
        raise UserError(f"[--keep] no rows; got {folder}; run experiments.papers.oscar first")
    to.mkdir(parents=True, exist_ok=True)
    for file in files:
        lines = [json.dumps(_short(row)) for row in read([file])]
        packed = gzip.compress("\n".join(lines).encode(), mtime=0)
        (to / f"{file.parent.name}-{file.stem}.jsonl.gz").write_bytes(packed)


def _short(row: Row) -> Row:
    def rounded(x: object) -> object:
        return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x

    return {name: rounded(x) for name, x in row.items() if name not in NOT_KEPT}


def number(x: float) -> str:
    """Return x as pages write it: two digits or more, no zero in front of the point."""
    if x == 0 or abs(x) >= 100:
        return f"{x:,.0f}"
    places = max(0, 1 - floor(log10(abs(x))))
    return re.sub(r"^(-?)0\.", r"\1.", f"{x:.{places}f}")


def _near_1(x: float) -> str:
    """Return x with two places from 1 on, three beside it: whether an interval holds 1 has to be seen."""
    if x != 1 and f"{x:.2f}" == "1.00":
        return f"{x:.3f}".removeprefix("0")
    return f"{x:.2f}" if 1 <= x < 2 else number(x)


def bracketed(x: intervals.Interval) -> str:
    if not x.known:
        return number(x.value)
    value, low, high = map(_near_1, (x.value, *x.limits))
    return f"{value} [{low}, {high}]"


class Figures:
    """What the template calls. Results name the models that have rows, in the order of MODELS; not the one model of a
    task that has no other."""

    def __init__(self, folder: Path = ROWS, least: int = LEAST):
        self.folder, self.least = folder, least

    @cached_property
    def _real(self) -> dict[str, Cells]:
        """What was measured of presets by MLX, by model."""
        found = read_real(self.folder.parent / "pretrained")
        return {m: found[name] for m in MODELS for name in found if m.lower().startswith(name)}

    @cached_property
    def _cells(self) -> dict[tuple[str, str], dict[str, Texts]]:
        found: dict[tuple[str, str], dict[str, Texts]] = {}
        files = sorted(self.folder.glob("*.jsonl.gz"))
        for row in [*read(files), *_rows_of(self._real)]:
            variants = found.setdefault((row["task"], row["model"]), {})
            variants.setdefault(row["preset"], {})[row["text"]] = row
        out = {}
        for (task, model), variants in found.items():
            whole = set.intersection(*map(set, variants.values()))
            if len(whole) >= self.least or task in ONCE:
                out[task, model] = {
                    name: {text: row for text, row in texts.items() if text in whole}
                    for name, texts in variants.items()
                }
        return out

    def texts(self, task: str, variant: str, model: str) -> Texts:
        """Return the rows of a variant by text, none where too few were measured."""
        return self._cells.get((task, model), {}).get(variant, {})

    def each(
        self, of_model: Callable[[str], str | None], task: str, only: str = "", same: bool = False
    ) -> str:
        """Return "MODEL RESULT" of the models that have one. only: short names by commas; of one, or of a task of one
        model, the result alone. same: alone, too, where all agree. Raises UserError if there is none."""
        chosen = only.split(", ") if only else list(MODELS.values())
        found = [(short, of_model(m)) for m, short in MODELS.items() if short in chosen]
        said = {short: text for short, text in found if text is not None}
        if not said:
            raise UserError(f"[papers.page] no rows; got {task} of {', '.join(chosen)}")
        models = {model for at, model in self._cells if at == task}
        if len(chosen) == 1 or len(models) == 1 or (same and len(set(said.values())) == 1):
            return next(iter(said.values()))
        return ", ".join(f"{short} {text}" for short, text in said.items())

    def kl(self, task: str, variant: str, only: str = "") -> str:
        """Return mean KL over texts, nats."""
        return self.mean(task, variant, "kl", only)

    def mean(self, task: str, variant: str, column: str, only: str = "") -> str:
        """Return the mean of a column over rows."""

        def of(model: str) -> str | None:
            rows = self.texts(task, variant, model).values()
            values = [row[column] for row in rows if column in row]
            return number(sum(values) / len(values)) if values else None

        return self.each(of, task, only)

    def over(
        self, task: str, ours: str, theirs: str, only: str = "", column: str = "kl", base: str = ""
    ) -> str:
        """Return mean KL, or that of another column, over another variant's on the same texts, with its interval of
        95 %. base: the other's task."""

        def of(model: str) -> str | None:
            sides = self.texts(task, ours, model), self.texts(base or task, theirs, model)
            both = [text for text in sides[0] if text in sides[1]]
            pair = ([side[text][column] for text in both] for side in sides)
            return bracketed(intervals.ratio(*pair)) if both else None

        return self.each(of, task, only)

    def nats(self, task: str, variant: str, other: str, only: str = "") -> str:
        """Return by how many nats a token a variant is less likely than another, with its interval of 95 %."""

        def of(model: str) -> str | None:
            ours, theirs = (self.texts(task, name, model) for name in (variant, other))
            more = [ours[text]["nll"] - theirs[text]["nll"] for text in ours if text in theirs]
            return bracketed(intervals.share(more)) if more else None

        return self.each(of, task, only)

    def gained(self, task: str, base: str, variant: str, *others: str, only: str = "") -> str:
        """Return which share of the best one's gain over `base` a variant has, in nats, with its interval of 95 %."""

        def of(model: str) -> str | None:
            rows = [self.texts(task, name, model) for name in (base, variant, *others)]
            if not all(rows):
                return None
            gains = [[rows[0][text]["nll"] - x[text]["nll"] for text in rows[0]] for x in rows[1:]]
            return bracketed(intervals.ratio(gains[0], max(gains, key=sum)))

        return self.each(of, task, only)

    def perplexity(self, task: str, variant: str, only: str = "") -> str:
        """Return how much a variant adds to perplexity."""

        def of(model: str) -> str | None:
            rows = self.texts(task, variant, model).values()
            return f"+{number(more_perplexity(rows))}" if rows else None

        return self.each(of, task, only)

    def bits(self, task: str, variant: str, only: str = "") -> str:
        """Return stored bits a value, with three digits."""

        def of(model: str) -> str | None:
            found = [row["bits"] for row in self.texts(task, variant, model).values()]
            return f"{sum(found) / len(found):.3g}" if found else None

        return self.each(of, task, only, same=True)

    def answers(self, preset: str, context: int = 4) -> str:
        """Return how many questions are answered after `context` K tokens by MLX, and by full precision."""

        def of(model: str) -> str | None:
            rows = self._real.get(model)
            ours, base = (rows and rows.answers(x, 1024 * context) for x in (preset, "fp16"))
            return f"{ours[0]} of {ours[1]} (full precision {base[0]})" if ours and base else None

        return self.each(of, f"real {context}k")

    def counted(self, task: str, variant: str) -> str:
        """Return of how many texts there are rows, of each model."""
        counts = {short: len(self.texts(task, variant, m)) for m, short in MODELS.items()}
        return ", ".join(f"{short} {count}" for short, count in counts.items() if count)

    def table(self, of: Callable[..., str], head: str, *lines: Sequence[str]) -> str:
        """Return a table of models that have rows. lines: a name and the arguments of `of`, such as `over`."""

        def cell(arguments: Sequence[str], model: str) -> str:
            try:
                return of(*arguments, only=model)
            except UserError:  # no rows
                return "-"

        columns = {m: [cell(arguments, m) for _, *arguments in lines] for m in MODELS.values()}
        columns = {m: cells for m, cells in columns.items() if set(cells) != {"-"}}
        names = [name for name, *_ in lines]
        return markdown([[head, *columns], *zip(names, *columns.values(), strict=True)])

    def speeds(self) -> str:
        """Return the table of attention over codes on a GPU."""
        lines = (self.folder / "codes.jsonl").read_text(encoding="utf-8").splitlines()
        times = [row for row in map(json.loads, lines) if "kind" in row]
        cases = list(dict.fromkeys(row["case"] for row in times))
        found = {(row["kind"], row["case"]): row for row in times}
        head = [f"{case.split()[1].upper()} tokens, us (torch over it)" for case in cases]
        table = [["keys and values", "bits read", *head]]
        for kind in dict.fromkeys(row["kind"] for row in times):
            own = [found[kind, case] for case in cases]
            read = own[0]["gigabytes_per_second"] * own[0]["microseconds"] * 1000  # bytes
            tokens = 1024 * int(cases[0].split()[1].removesuffix("k"))
            bits = 8 * read / (VALUES * tokens) or 16.0  # torch's are not counted
            shown = [f"{x['microseconds']:.1f} ({x['ratio']:.2f})" for x in own]
            table.append([kind, f"{bits:.2f}", *shown])
        return markdown(table)

    def encode(
        self, what: str, over: str = "srft", vectors: int = 4096, of: int = 4096, track: str = ""
    ) -> str:
        """Return the time of a part of encode for a vector, over that of another part of `of` at once, by head dim; of
        tracks of the GPU's machine, as "triton/mlx cpu", over another track's."""
        file = "encode-h200.json" if track else "encode.json"
        rows = json.loads((self.folder / file).read_text(encoding="utf-8"))["rows"]
        times = {(x["track"], x["dims"], x["vectors"], x["what"]): x["nanoseconds"] for x in rows}
        dims = sorted({dims for _, dims, _, _ in times})
        ours, _, theirs = (track or "mlx cpu").partition("/")
        pairs = [(times[ours, d, vectors, what], times[theirs or ours, d, of, over]) for d in dims]
        return ", ".join(number(a / b) for a, b in pairs)

    def surrogate(self, dims: int = 64, bases: int = 256) -> str:
        """Return how far above the eigenvectors' surrogate (OSCAR, theorem 1) other orthogonal bases come, for a target
        of `dims` dims that differ, and variances of codes against its order."""
        spread = np.exp(gaussian((dims,), 1))
        rows = gaussian((4 * dims, dims), 0) * spread
        target, variances = rows.T @ rows / len(rows), np.sort(np.exp(gaussian((dims,), 2)))[::-1]
        best = oscar.eigenbasis(target)[1]
        lowest = oscar.frozen_error(target, best, variances)

        def over(basis: np.ndarray) -> float:
            return oscar.frozen_error(target, basis, variances) / lowest

        noise = gaussian((bases, dims, dims), 3)
        apart = min(over(x) for x in np.linalg.qr(noise)[0])
        near = min(over(best @ x) for x in np.linalg.qr(np.eye(dims) + 1e-3 * noise)[0])
        named = (number(over(x)) for x in (oscar.mixing(dims, False), np.eye(dims)))
        return (
            f"of {bases} random bases of {dims} dims the lowest has {number(apart)} times the eigenvectors', of as "
            f"many turned a little {number(1e6 * (near - 1))} millionths more; Hadamard {next(named)}, "
            f"no rotation {next(named)}"
        )

    def humaneval(self) -> str:
        """Return HumanEval's tables, a model each, or that there is none."""
        from experiments.papers import humaneval  # torch comes with it

        parts = []
        for model, short in MODELS.items():
            file = self.folder / f"humaneval-{model}.jsonl.gz"
            if file.exists():
                parts.append(f"{short}:\n\n{humaneval.table(read([file]))}")
        return "\n\n".join(parts) or "No rows yet."

    def solved(self, preset: str, context: int = 4096, model: str = "Qwen") -> str:
        """Return how many tasks of HumanEval pass on a model."""
        return str(
            sum(row["passed"] for row in tasks_of(self.folder, model)[context, preset].values())
        )

    def lost(self, preset: str, column: str = "passed", context: int = 4096) -> str:
        """Return how many tasks of HumanEval on Qwen have a column with fp16 behind `context` tokens alone, and with
        a preset behind 4,096 alone, and McNemar's p."""
        from experiments.papers.humaneval import mcnemar

        of = tasks_of(self.folder, "Qwen")
        base, ours = of[context, "fp16"], of[4096, preset]
        pairs = [(base[text][column], row[column]) for text, row in ours.items() if text in base]
        counts = pairs.count((True, False)), pairs.count((False, True))
        return f"{counts[0]} against {counts[1]}, p {number(mcnemar(*counts))}"


def _rows_of(real: Mapping[str, Cells]) -> Iterator[Row]:
    for model, found in real.items():
        for (_, windows, context), texts in found.texts.items():
            task = f"real {'' if windows == OURS else 'paper '}{context // 1024}k"
            for row in texts:
                more = {"bits": row["bits_per_value"], "differ": 1 - row["top1"]}
                yield row | more | {"task": task, "model": model}


@cache
def tasks_of(folder: Path, short: str) -> dict[tuple[int, str], Texts]:
    """Return rows of HumanEval on a model by context and preset."""
    model = next(model for model, name in MODELS.items() if name == short)
    return cells(read([folder / f"humaneval-{model}.jsonl.gz"]), "humaneval", model)


def page(figures: Figures) -> str:
    """Return the text of the page. Raises UserError for a call that has no rows."""
    names = {name: getattr(figures, name) for name in vars(Figures) if not name.startswith("_")}

    def called(match: re.Match) -> str:
        try:
            return eval(match[1], {"__builtins__": {}} | names)
        except (SyntaxError, NameError, TypeError) as error:
            raise UserError(f"[{TEMPLATE.name}] {error}; got {match[1]}") from None

    return CALL.sub(called, TEMPLATE.read_text(encoding="utf-8"))


# -- Pictures: KL, or more perplexity, of variants.

PICTURES: dict[str, tuple[str, str, Sequence[str]]] = {  # paper: task, title, variants
    "oscar": (
        "oscar",
        "OSCAR at 2.1 to 2.5 bits: parts (its table 4), rotations, and keys made even",
        (
            *("oscar-none", "oscar-u", "oscar-h", "oscar", "oscar+layer", "oscar+lloyd"),
            *("oscar+centroids", "oscar+even", "kivi-int2", "fill-2.25"),
        ),
    ),
    "polarquant": (
        "polarquant",
        "Codes of keys alone, values exact: pairs as radius and angle, and scalar codes",
        (
            *("wu-r4t4/fp16", "wu-r4t4+unwrapped/fp16", "channel-4+g128/fp16", "turbo-4/fp16"),
            *("wu-r3t3/fp16", "wu-r3t3+unwrapped/fp16", "channel-3+g128/fp16", "turbo-3/fp16"),
            *("han/fp16", "han+plain/fp16"),
        ),
    ),
    "srft": (
        "srft.hook",
        "4 bits by the paper's hook: more perplexity of 512 tokens, none exact",
        (
            *("none", "srft", "hadamard", "srft+tensor", "srft+g32", "srft+lambda+g32"),
            *("none+g32", "none+lambda+g32", "none+learned-scale", "srft+learned-scale"),
        ),
    ),
    "ojakv": (
        "ojakv",
        "Low rank: a fixed basis, one that follows the text, the best one of this text",
        (
            *("static-0.6", "static-0.6+windows", "static-0.6+windows+int4", "oja-0.6"),
            *(
                "oracle-0.6",
                "static-0.9+windows",
                "static-0.9+windows+int4",
                "oja-0.9",
                "oracle-0.9",
            ),
            *("oja-0.6+raw", "int4"),
        ),
    ),
}


def picture(figures: Figures, paper: str) -> str:
    """Return the SVG of a paper's variants, a mark a model."""
    task, title, variants = PICTURES[paper]
    hook = task.endswith(".hook")
    with plots.pyplot() as plt:
        figure, axis = plt.subplots(figsize=(9.5, 0.42 * len(variants) + 1.6))
        for (model, short), colour in zip(MODELS.items(), COLOURS, strict=True):
            points = []
            for line, variant in enumerate(reversed(variants)):
                rows = list(figures.texts(task, variant, model).values())
                if rows:
                    kl = sum(row["kl"] for row in rows) / len(rows) if not hook else 0.0
                    points.append((more_perplexity(rows) if hook else kl, line))
            if points:
                axis.plot(*zip(*points, strict=True), "o", color=colour, label=short)
        if hook:
            axis.set_xscale("symlog", linthresh=1)
            axis.set_xlim(left=0)  # with a tick there, as 0 to 1 is linear
        else:
            axis.set_xscale("log")
        axis.set_yticks(range(len(variants)), reversed(variants))
        axis.set_xlabel("more perplexity" if hook else "mean KL over texts (nats)")
        axis.set_title(title)
        axis.grid(axis="x", alpha=0.3)
        axis.legend(loc="best")
        figure.tight_layout()
        return plots.svg(figure)


def write(figures: Figures) -> None:
    """Write the page and its pictures."""
    for paper in PICTURES:
        (ROWS / f"{paper}.svg").write_text(picture(figures, paper), encoding="utf-8")
    PAGE.write_text(page(figures), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("papers.page", __doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of a run, stored first")
    args = parser.parse_args(arguments)
    if args.keep:
        keep(args.keep)
    write(Figures())


if __name__ == "__main__":
    console.run_tool(main)
