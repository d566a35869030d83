"""Write a report: `report.json`, `report.md`, and `report.svg` where matplotlib is installed."""

from __future__ import annotations

import json
from pathlib import Path

from mlxkv.errors import MachineError
from mlxkv.eval import plots, report, verdict

PICTURE = "report.svg"


def write_page(data: dict, folder: Path) -> None:
    """Write the files to `folder`. data: of `report.assemble`. Raises MachineError."""
    try:
        text = json.dumps(data, ensure_ascii=False, indent=1)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        picture = plots.bits(data) if plots.available() else None
        if picture is not None:
            (folder / PICTURE).write_text(picture, encoding="utf-8")
        (folder / "report.md").write_text(markdown(data, picture is not None), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"[--out] cannot write the report: {error.strerror}") from None


def markdown(data: dict, picture: bool) -> str:
    """Return the report as Markdown. picture: whether PICTURE lies beside it."""
    out = [f"# {_plain(data['model'])}: what a compressed cache costs", "", *_about(data), ""]
    for context in data["contexts"]:
        columns, rows = report.table(data, context)
        out += [f"## {context} tokens", ""]
        for name, colour, sentence in verdict.sentences(data, context):
            out += [f"- **{_plain(name)}** ({colour}): {_plain(sentence)}"]
        out += ["", *_table(columns, rows), ""]
    out += [f"- {_plain(line)}" for line in report.notes(data)]
    if picture:
        out += ["", f"![Bits per value against KL divergence]({PICTURE})"]
    elif not plots.available():
        out += ["", "No picture: it needs matplotlib (pip install matplotlib)."]
    return "\n".join(out) + "\n"


def _about(data: dict) -> list[str]:
    machine = data.get("machine", {})
    versions = ", ".join(f"{k} {v}" for k, v in data.get("versions", {}).items() if v)
    lines = (
        f"{machine.get('chip', '')}, {machine.get('system', '')}",
        versions,
        f"weights {data['fingerprint'][:12]}, computed in {data['dtype']}",
    )
    return [f"- {_plain(line)}" for line in lines]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(map(_plain, line)) + " |" for line in lines]


def _plain(text: str) -> str:
    """Escape what Markdown and HTML would read in a name."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
