"""Show the outliers that the natural models grew: `python -m experiments.outliers`.

Reads training/natural/results/MODEL-outliers.csv (`python -m natural.observe table`), a row a layer and observation,
and writes the tables and the picture of docs/results/outliers.md below its line "<!-- figures -->".
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from experiments.options import Parser
from mlxkv import console, plots
from mlxkv.errors import UserError

ROOT = Path(__file__).parents[1]
MODELS = ("natural-qwen", "natural-gemma")
FIGURES = "<!-- figures -->"
PANELS = (
    ("sink_max", "attention on the first token, largest head", "linear"),
    ("hidden.ratio", "largest activation over the median", "log"),
    ("keys.offset_max", "keys: largest |mean| / std of a channel", "log"),
)
COLUMNS = (
    ("window", "window", "{}"),
    ("sink: mean", "sink_mean", "{:.2f}"),
    ("largest head", "sink_max", "{:.2f}"),
    ("hidden: largest / median", "hidden.ratio", "{:.0f}"),
    ("without the first token", "hidden.ratio_without_first", "{:.0f}"),
    ("keys: channel ratio", "keys.channel_ratio", "{:.1f}"),
    ("kurtosis", "keys.kurtosis", "{:.1f}"),
    ("offset: largest", "keys.offset_max", "{:.1f}"),
    ("median", "keys.offset_median", "{:.2f}"),
    ("first token's norm", "keys.first_norm", "{:.2f}"),
    ("values: channel ratio", "values.channel_ratio", "{:.1f}"),
    ("kurtosis", "values.kurtosis", "{:.1f}"),
    ("first token's norm", "values.first_norm", "{:.2f}"),
)
GROWTH = (
    ("sink: mean of layers", "sink_mean", sum),
    ("largest head", "sink_max", max),
    ("hidden: largest / median", "hidden.ratio", max),
    ("keys: channel ratio", "keys.channel_ratio", max),
    ("kurtosis", "keys.kurtosis", max),
    ("offset", "keys.offset_max", max),
    ("values: kurtosis", "values.kurtosis", max),
)
Rows = list[dict[str, str]]


def read(file: Path) -> list[Rows]:
    """Return the observations of a file, each with its layers. Raises UserError."""
    try:
        with file.open(encoding="utf-8", newline="") as text:
            rows = list(csv.DictReader(text))
    except OSError as error:
        raise UserError(f"[outliers] cannot read; got {file}: {error.strerror}") from None
    by_step: dict[str, Rows] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    return list(by_step.values())


def layers(model: str, found: list[Rows]) -> list[str]:
    """Return a table of the last observation, a row a layer."""
    lines = [f"### {model}, by layer, after {_million(found[-1])} M tokens", ""]
    lines += [_line(["layer", *(title for title, _, _ in COLUMNS)])]
    lines += [_line(["---"] * (len(COLUMNS) + 1))]
    for row in found[-1]:
        cells = [row["layer"], row["window"] or "full"]
        cells += [form.format(float(row[name])) for _, name, form in COLUMNS[1:]]
        lines.append(_line(cells))
    return [*lines, ""]


def growth(model: str, found: list[Rows]) -> list[str]:
    """Return a table of observations: the largest number of any layer, of the first column the mean."""
    lines = [f"### {model}, as training goes on", ""]
    lines += [_line(["M tokens", *(title for title, _, _ in GROWTH)])]
    lines += [_line(["---"] * (len(GROWTH) + 1))]
    for rows in found:
        cells = [_million(rows)]
        for _, name, of in GROWTH:
            value = of(float(row[name]) for row in rows)
            cells.append(f"{value / len(rows) if of is sum else value:.2f}")
        lines.append(_line(cells))
    return [*lines, ""]


def picture(found: dict[str, list[Rows]]) -> str:
    """Return SVG text of three panels over layers: a colour a model, later observations stronger."""
    with plots.pyplot() as plt:
        figure, axes = plt.subplots(1, len(PANELS), figsize=(4.3 * len(PANELS), 3.6))
        for axis, (name, title, scale) in zip(axes, PANELS, strict=True):
            for index, (model, observed) in enumerate(found.items()):
                for i, rows in enumerate(observed):
                    last = i == len(observed) - 1
                    axis.plot(
                        [int(row["layer"]) for row in rows],
                        [float(row[name]) for row in rows],
                        color=f"C{index}",
                        marker=".",
                        alpha=1.0 if last else 0.1 + 0.4 * i / len(observed),
                        linewidth=1.6 if last else 0.9,
                        label=model if last else None,
                    )
            axis.set_yscale(scale)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("layer")
        axes[0].legend()
        figure.tight_layout()
        return plots.svg(figure)


def _million(rows: Rows) -> str:
    return f"{int(rows[0]['tokens']) / 1e6:.0f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("outliers", __doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=ROOT / "training" / "natural" / "results")
    add("--out", type=Path, default=ROOT / "docs" / "results" / "outliers.md")
    args = parser.parse_args(arguments)
    found = {model: read(args.folder / f"{model}-outliers.csv") for model in MODELS}
    lines = [
        FIGURES,
        "",
        f"![Sinks, massive activations, offsets of keys]({args.out.stem}.svg)",
        "",
    ]
    for table in (growth, layers):
        for model, observed in found.items():
            lines += table(model, observed)
    try:
        old = args.out.read_text(encoding="utf-8") if args.out.exists() else "# Outliers\n\n"
        args.out.write_text(old.split(FIGURES)[0] + "\n".join(lines), encoding="utf-8")
        args.out.with_suffix(".svg").write_text(picture(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"[--out] cannot write; got {args.out}: {error.strerror}") from None
    console.note(str(args.out))


if __name__ == "__main__":
    console.run_tool(main)
