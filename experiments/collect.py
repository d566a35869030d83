"""Print reports of `mlxkv eval` as one page of Markdown: `python -m experiments.collect FOLDER...`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from experiments.options import Parser
from mlxkv import console
from mlxkv.errors import UserError
from mlxkv.eval.report import report
from mlxkv.eval.report.pictures import all_of, panels
from mlxkv.scrub import public_name


def read(folder: Path) -> dict:
    """Read the `report.json` of a folder, or the file itself. Raises UserError."""
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
    """Return a table per model and context, and the notes that explain them."""
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


def pictures(reports: list[dict], folder: Path) -> list[Path]:
    """Write every picture of every report to MODEL-TITLE.svg in `folder`; return the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"[--pictures] no such folder; got {folder}: {error.strerror}") from None
    out = []
    for data in reports:
        for title, _, svg in all_of(data):
            stem = re.sub(
                r"[^a-z0-9]+", "-", f"{public_name(data['model'])} {title}".lower()
            ).strip("-")
            out.append(folder / f"{stem}.svg")
            out[-1].write_text(svg, encoding="utf-8")
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("collect", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="what --out of mlxkv eval wrote")
    parser.add_argument("--picture", type=Path, help="write bits against mean KL to this SVG file")
    parser.add_argument("--pictures", type=Path, help="write all pictures to this folder, as SVG")
    args = parser.parse_args(arguments)
    reports = [read(folder) for folder in args.folders]
    if args.picture:
        context = min(max(data["contexts"]) for data in reports)
        try:
            args.picture.write_text(panels(reports, context), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"[--picture] cannot write; got {args.picture}: {error.strerror}"
            ) from None
    if args.pictures:
        for file in pictures(reports, args.pictures):
            console.note(str(file))
    print(markdown(reports))


if __name__ == "__main__":
    console.run_tool(main)
