"""`mlxkv bench render`: shared results as one Markdown table."""

from __future__ import annotations

from mlxkv import console
from mlxkv.bench.whole import rows, share
from mlxkv.errors import UserError
from mlxkv.scrub import read_folder, table_line

HEADS = [
    "machine",
    "power",
    "model",
    *rows.COLUMNS,
    "mlxkv, MLX, mlx-lm",
    "date",
    "what went wrong",
]
NUMERIC = {"context", *rows.COLUMNS[2:]}


def run(folder: str) -> int:
    """Print the table; exit code 2 if a file is bad."""
    found, bad = read_folder(folder, "render", share.read)
    if not found and not bad:
        raise UserError(f"[render] no .json file there; got {folder}; choose another folder")
    print(markdown(found))
    return 2 if bad else 0


def markdown(found: list[dict]) -> str:
    """One Markdown table of all rows, ordered by machine, model and context."""
    lines = [(_place(data), row, data) for data in found for row in data["rows"]]
    lines.sort(key=lambda line: (line[0], line[1]["context"]))
    marks = ["---:" if head in NUMERIC else "---" for head in HEADS]
    table = [table_line(HEADS), "|" + "|".join(marks) + "|"]
    return "\n".join([*table, *(table_line(_cells(row, data)) for _, row, data in lines)])


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
