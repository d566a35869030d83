"""Documents of several models as one page of Markdown: `python -m mlxkv.eval.ablation.collect FILE...`.

The parts of rotations in a table per model, the rest in one table with columns per model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval.ablation import search
from mlxkv.eval.arms import BASELINE
from mlxkv.eval.part import Results

Row = dict[str, float]
Columns = dict[str, Callable[[Row], str]]


def read(file: Path) -> dict:
    """What `python -m mlxkv.eval.ablation WHAT --out FILE` wrote."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        data["what"], data["model"], data["asked"], data["rows"]  # noqa: B018 - what the tables need
        return data
    except OSError as error:
        raise UserError(f"[collect] cannot read; got {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"[collect] not a document of an ablation; got {file}") from None


def figure(x: float) -> str:
    """Three digits, with no exponent for what is above a hundred-thousandth."""
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
    """Arms down, blocks across, some columns of each. blocks: what stands above -> rows by arm."""
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
    """{"group 128": {"full": ...}} of {"full, group 128": ...}, full precision left out."""
    out: dict[str, Results] = {}
    for arm, row in rows.items():
        name, _, codes = arm.partition(", ")
        if arm != BASELINE:
            out.setdefault(codes, {})[name] = row
    return out


def with_bits(blocks: dict[str, Results]) -> dict[str, Results]:
    """Of searches, in the order of their candidates; bits per value in the name."""
    names = {}
    for name in search.candidates():
        found = {f"{rows[name]['bits_per_value']:.2f}" for rows in blocks.values() if name in rows}
        names[name] = f"{name} ({' to '.join(sorted(found))})"
    return {
        model: {names[name]: rows[name] for name in names if name in rows}
        for model, rows in blocks.items()
    }


def markdown(documents: list[dict]) -> str:
    """All tables, and under each kind how they were made."""
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
        f"{data['what']}: {asked['decode']} tokens decoded behind {asked['context']}"
        f"{'' if data['what'] == 'search' else ', 2 bits'}; "
        f"{machine['device'] or machine['chip']}, mlx {versions['mlx']}, mlxkv {versions['mlxkv']}"
    )


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what --out of the ablations wrote")
    print(markdown([read(file) for file in parser.parse_args(arguments).files]))


if __name__ == "__main__":
    console.run_tool(main)
