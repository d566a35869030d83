"""Print documents of ablations as Markdown: `python -m experiments.ablation.collect FILE...`.

`parts` gives a table per model, the others one table with columns per model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from experiments.ablation import search
from experiments.options import Parser
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.tasks.part import Results

Row = dict[str, float]
Columns = dict[str, Callable[[Row], str]]


def read(file: Path) -> dict:
    """Read what `python -m experiments.ablation WHAT --out FILE` wrote. Raises UserError."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        data["what"], data["model"], data["asked"], data["rows"]  # noqa: B018 - what the tables need
        return data
    except OSError as error:
        raise UserError(f"[collect] cannot read; got {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"[collect] not a document of an ablation; got {file}") from None


def figure(x: float) -> str:
    """Format with three digits, or six decimals below a thousandth."""
    return f"{x:.6f}".rstrip("0").rstrip(".") if abs(x) < 0.001 else f"{x:.3g}"


def percent(x: float) -> str:
    return f"{100 * x:.0f} %"


def kl(row: Row) -> str:
    return f"{figure(row['kl_mean'])} ± {figure(row['kl_error'])}"


PARTS: Columns = {
    "KL": kl,
    "perplexity": lambda row: f"{row['ppl']:.3f}",
    "one key / four": lambda row: (
        f"{percent(row['single_right'])} / {percent(row['four_right'])}"
        if "single_right" in row
        else ""
    ),
}
DOMAINS: Columns = {
    f"KL of {text}": (lambda row, text=text: kl(row[text])) for text in ("stories", "corpus")
}
SEARCH: Columns = {
    "KL": kl,
    "99 %": lambda row: figure(row["kl_p99"]),
    "prompt KL": lambda row: figure(row["prompt_kl_mean"]),
}
WINDOWS: Columns = {
    "KL": kl,
    "bits per value": lambda row: f"{row['bits_per_value']:.2f}",
}


def table(blocks: dict[str, Results], columns: Columns) -> list[str]:
    """Return a table with a row per arm and, for each block, the columns. blocks: {title: rows}."""
    heads = ["", *(f"{title}: {name}" for title in blocks for name in columns)]
    arms = dict.fromkeys(arm for rows in blocks.values() for arm in rows)
    lines = []
    for arm in arms:
        cells = [
            show(rows[arm]) if arm in rows else ""
            for rows in blocks.values()
            for show in columns.values()
        ]
        lines.append(_line([arm, *cells]))
    return [_line(heads), _line(["---"] * len(heads)), *lines]


def by_codes(rows: Results) -> dict[str, Results]:
    """{"full, group 128": row} -> {"group 128": {"full": row}}, without full precision."""
    out: dict[str, Results] = {}
    for arm, row in rows.items():
        name, _, codes = arm.partition(", ")
        if arm != BASELINE:
            out.setdefault(codes, {})[name] = row
    return out


def with_bits(blocks: dict[str, Results]) -> dict[str, Results]:
    """Sort rows of searches by their candidates, and add bits per value to the names."""
    names = {}
    for name in search.candidates():
        found = {f"{rows[name]['bits_per_value']:.2f}" for rows in blocks.values() if name in rows}
        names[name] = f"{name} ({' to '.join(sorted(found))})"
    return {
        model: {names[name]: rows[name] for name in names if name in rows}
        for model, rows in blocks.items()
    }


def markdown(documents: list[dict]) -> str:
    """Return all tables, and after each kind of table how it was made."""
    kinds = {
        what: [data for data in documents if data["what"] == what]
        for what in ("parts", "domains", "windows", "search")
    }
    lines = []
    for data in kinds["parts"]:
        lines += [f"### {data['model']}", "", *table(by_codes(data["rows"]), PARTS), ""]
    lines += _made(kinds["parts"])
    texts = [(data["model"], by_codes(data["rows"])) for data in kinds["domains"]]
    for codes in dict.fromkeys(codes for _, rows in texts for codes in rows):
        blocks = {model: rows[codes] for model, rows in texts if codes in rows}
        lines += [f"### Calibrated on: {codes}", "", *table(blocks, DOMAINS), ""]
    lines += _made(kinds["domains"])
    if some := kinds["windows"]:
        blocks = {data["model"]: data["rows"] for data in some}
        lines += ["### Windows", "", *table(blocks, WINDOWS), "", *_made(some)]
    if some := kinds["search"]:
        blocks = with_bits({data["model"]: data["rows"] for data in some})
        lines += ["### Search", "", *table(blocks, SEARCH), "", *_made(some)]
    return "\n".join(lines)


def _made(some: list[dict]) -> list[str]:
    lines = [f"- {_how(data)}" for data in some]
    return [*dict.fromkeys(lines), ""] if lines else []


def _how(data: dict) -> str:
    asked, machine, versions = data["asked"], data["machine"], data["versions"]
    return (
        f"{data['what']}: {asked['decode']} tokens decoded after {asked['context']}"
        f"{'' if data['what'] == 'search' else ', 2 bits'}; "
        f"{machine['device'] or machine['chip']}, mlx {versions['mlx']}, mlxkv {versions['mlxkv']}"
    )


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("ablation.collect", __doc__)
    parser.add_argument("files", nargs="+", type=Path, help="what --out of the ablations wrote")
    print(markdown([read(file) for file in parser.parse_args(arguments).files]))


if __name__ == "__main__":
    console.run_tool(main)
