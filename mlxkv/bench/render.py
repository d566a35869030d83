"""`mlxkv bench render`: shared results as one Markdown table."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxkv import console
from mlxkv.bench import rows, share
from mlxkv.errors import UserError

FOLDER = "docs/results/bench"
HEADS = (
    *("machine", "power", "model", *rows.COLUMNS, "mlxkv, MLX, mlx-lm", "date"),
    "what went wrong",
)
NUMERIC = {"context", *rows.COLUMNS[2:]}


def run(folder: str) -> int:
    """The command: the table to stdout; a line on stderr and exit code 2 for files that are bad."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"[render] no such folder; got {folder}; choose one with shared files")
    found, bad = [], 0
    for file in sorted(path.glob("*.json")):
        try:
            found.append(share.read(file))
        except UserError as error:
            console.note(" ".join(str(error).split()))
            bad += 1
    if not found and not bad:
        raise UserError(f"[render] no .json file there; got {folder}; choose another folder")
    print(markdown(found))
    return 2 if bad else 0


def markdown(found: list[dict]) -> str:
    """One table of all rows, ordered by machine, model and context."""
    lines = [(_place(data), row, data) for data in found for row in data["rows"]]
    lines.sort(key=lambda line: (line[0], line[1]["context"]))
    marks = ["---:" if head in NUMERIC else "---" for head in HEADS]
    table = [_line(HEADS), "|" + "|".join(marks) + "|"]
    return "\n".join([*table, *(_line(_cells(row, data)) for _, row, data in lines)])


def _place(data: dict) -> tuple[str, str, str]:
    return _machine(data), data["model"]["name"], data["date"]


def _machine(data: dict) -> str:
    machine = data["machine"]
    memory = console.human_bytes(machine["memory_bytes"])
    return f"{machine['chip']}, {memory}, {machine['backend']}"


def _cells(row: dict, data: dict) -> list[str]:
    model, power = data["model"], data["machine"]["power"]
    name = f"{model['name']}, {model['dtype']}"
    if model["weights"] == "random":
        name += ", random weights"
    if model.get("bits"):
        name += f" in {model['bits']} bits"
    versions = ", ".join(data["versions"][name] for name in ("mlxkv", "mlx", "mlx-lm"))
    place = (_machine(data), f"{power['source']}, {power['mode']}", name)
    return [*place, *rows.cells(row), versions, data["date"], row["error"] or ""]


def _line(cells) -> str:
    return "| " + " | ".join(_plain(str(cell)) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text that stays one cell and no markup."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'")
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")


if __name__ == "__main__":
    console.run_tool(lambda: run(sys.argv[1] if len(sys.argv) > 1 else FOLDER))
