"""Reports of several models as one page of Markdown: `python -m mlxkv.eval.collect FOLDER...`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval import report


def read(folder: Path) -> dict:
    """The `report.json` of a folder (or the file itself)."""
    file = folder / "report.json" if folder.is_dir() else folder
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        data["rows"], data["contexts"], data["windows"]  # noqa: B018 - what the tables need
        return data
    except OSError as error:
        raise UserError(f"[collect] cannot read a report; got {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"[collect] not a report of mlxkv eval; got {file}") from None


def markdown(reports: list[dict]) -> str:
    """A table per model and context, and what has to be known to read them."""
    lines = []
    for data in reports:
        for context in data["contexts"]:
            columns, rows = report.table(data, context)
            lines += [f"## {data['model']}, {context} tokens", ""]
            lines += [_line(columns), _line(["---"] * len(columns))]
            lines += [_line(row) for row in rows]
            lines += ["", *(f"- {reason}" for reason in report.reasons(data, context)), ""]
    seen = dict.fromkeys(note for data in reports for note in report.notes(data))
    lines += [f"- {note}" for note in seen]
    for where in dict.fromkeys(_where(data) for data in reports):
        lines.append(f"- {where}")
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _where(data: dict) -> str:
    machine, versions = data["machine"], data["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("mlxkv", "mlx", "mlx-lm"))
    return f"machine: {machine.get('device') or machine['chip']}, {machine['system']}; {named}; {data['dtype']}"


def picture(reports: list[dict], context: int, file: Path) -> None:
    """Bits against mean KL, one panel per model."""
    from mlxkv.eval.pictures import panels

    file.write_text(panels(reports, context), encoding="utf-8")


def pictures(reports: list[dict], folder: Path) -> list[Path]:
    """Every picture of every report as a file MODEL-TITLE.svg: stages by layer, bits against KL, ..."""
    from mlxkv.eval.pictures import all_of

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"[--pictures] no such folder; got {folder}: {error.strerror}") from None
    out = []
    for data in reports:
        for title, _, svg in all_of(data):
            stem = re.sub(r"[^a-z0-9]+", "-", f"{data['model']} {title}".lower()).strip("-")
            out.append(folder / f"{stem}.svg")
            out[-1].write_text(svg, encoding="utf-8")
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path, help="an SVG file: bits against mean KL")
    parser.add_argument("--pictures", type=Path, help="a folder for all pictures, as SVG files")
    args = parser.parse_args(arguments)
    reports = [read(folder) for folder in args.folders]
    if args.picture:
        picture(reports, min(max(data["contexts"]) for data in reports), args.picture)
    if args.pictures:
        for file in pictures(reports, args.pictures):
            console.note(str(file))
    print(markdown(reports))


if __name__ == "__main__":
    console.run_tool(main)
