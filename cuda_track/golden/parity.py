"""`python -m cuda_track.golden.parity`: write the golden table of every backend to one page,
docs/results/parity.md.

MLX runs in a process of its own (`mlxkv doctor --json`). A GPU's rows come from the file that
`python -m cuda_track.golden --device cuda --json FILE` wrote there, or from the rows that are kept beside the page.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxkv import console
from mlxkv.errors import UserError

PAGE = Path("docs/results/parity.md")
ROWS = "rows.json.gz"  # beside the page, in a folder of its name
NOT_RUN = "not run"
MLX = ("golden", "backends", "versions")  # of the report of `mlxkv doctor`
TORCH = ("torch", "triton")
METHODS = {
    "packing": "codes in words",
    "attention": "affine codes, windows, masks",
    "softcap": "capped scores (Gemma 2)",
    "codebook": "TurboQuant",
    "polar_tree": "PolarQuant (Han)",
    "polar": "PolarQuant (Wu)",
    "oja": "OjaKV, SnapKV",
    "oscar": "OSCAR",
    "balanced": "balanced",
    "centred": "balanced, keys centred",
    "scaled": "SRFT with scales",
    "fill": "mixed bits",
    "latent": "latents (MLA)",
    "learned": "learning",
}
Key = tuple[str, str]  # table, case
Line = tuple[str, str]  # golden set, method
Rows = list[dict] | None  # of `Row.as_dict`, torch's with their set; None: not run
HEAD = """# Parity

Whether Metal, CUDA, Triton and plain operations store the same codes.

How well each backend reproduces the golden tensors, which come from the specification in NumPy float64
(`mlxkv/spec/`).

- *ties*: codes one step off where the spec's value lies at a rounding boundary, of so many *values*;
  the table would call any other difference WRONG
- *rms*: the largest rms(x - spec) / rms(spec) of floats; at most *bound* is allowed
- *pool*: codes and numbers that torch ops made, put into the order that Triton reads, and back
- a dash: this backend has no such row; Triton attends with float16 weights, so up to 2e-3 is allowed

Made by `python -m cuda_track.golden.parity` from [rows](parity). The columns of a GPU come from `--gpu FILE`, which
`python -m cuda_track.golden --device cuda --json FILE` writes on a machine that has one.
"""


def sets(rows: Iterable[dict]) -> dict[Key, str]:
    """Return the golden set of each row of torch."""
    return {(row["table"], row["case"]): row["set"] for row in rows}


def line_of(row: dict, sets_by_row: dict[Key, str]) -> Line:
    """Return the line of a row of any backend. sets_by_row: golden sets by row; other rows stand under their table."""
    case = row["case"].split(",")[0]  # behind a comma Triton names the side
    parts = case.split(".")
    if row["case"].endswith(", restored"):
        return "pool", METHODS[parts[0]]
    key = row["table"], case
    name = sets_by_row[key] if key in sets_by_row else row["table"]  # MLX has more tables
    if name in ("affine", "clip"):
        return name, f"int{parts[1]} per {parts[3] if name == 'affine' else 'token, clipped'}"
    return name, METHODS.get(name, parts[0] if name in ("transform", "encode") else name)


def cell(rows: Iterable[dict]) -> str:
    """Sum up the rows of one line: ties and rms."""
    rows = list(rows)
    if not rows:
        return "-"
    if not all(row["ok"] for row in rows):
        return f"WRONG: {', '.join(row['case'] for row in rows if not row['ok'])}"
    floats = [row["rms"] for row in rows if row["bound"]]
    ties = f"{sum(row['differ'] for row in rows)} ties" if len(floats) < len(rows) else ""
    return ", ".join(x for x in (ties, f"rms {_short(max(floats))}" if floats else "") if x)


def _short(x: float) -> str:
    return f"{x:.0e}" if x else "0"


def page(columns: dict[str, Rows], sets_by_row: dict[Key, str], notes: list[str]) -> str:
    """Write the page in Markdown. columns: rows of each backend. notes: lines about machines and versions."""
    lines: dict[Line, dict[str, list[dict]]] = {}
    for name, rows in columns.items():
        for row in rows or ():
            lines.setdefault(line_of(row, sets_by_row), {}).setdefault(name, []).append(row)
    out = [HEAD, *(f"- {text}" for text in notes), ""]
    out.append("| " + " | ".join(["golden set", "method", "values", "bound", *columns]) + " |")
    out.append("|" + "---|" * (4 + len(columns)))
    for (name, method), by_column in lines.items():
        longest = max(by_column.values(), key=len)
        # The page says above what Triton may have instead.
        bound = min(max(row["bound"] for row in rows) for rows in by_column.values())
        cells = [
            NOT_RUN if rows is None else cell(by_column.get(column, ()))
            for column, rows in columns.items()
        ]
        values = str(sum(row["values"] for row in longest))
        row = [name, method, values, _short(bound) if bound else "-", *cells]
        out.append("| " + " | ".join(row) + " |")
    return "\n".join(out) + "\n"


def page_of(measured: dict) -> str:
    """Write the page. measured: "mlx", a report of `mlxkv doctor`, "torch" and "gpu", files of `cuda_track.golden`;
    "gpu" may be {}."""
    mlx, cpu, gpu = (measured[name] for name in ("mlx", "torch", "gpu"))
    device = next(row["name"] for row in mlx["backends"] if row["used"])
    columns = {
        f"MLX, {device}": mlx["golden"],
        "torch, CPU": cpu["torch"],
        "Triton, interpreter": cpu["triton"] or None,
        "torch, GPU": gpu.get("torch"),
        "Triton, GPU": gpu.get("triton"),
    }
    versions = ", ".join(f"{n} {mlx['versions'][n]}" for n in ("mlxkv", "mlx", "numpy"))
    notes = [f"here: {versions}, {cpu['versions']}"]
    notes.append(f"GPU: {gpu['device']}, {gpu['versions']}" if gpu else f"GPU: {NOT_RUN} yet")
    return page(columns, sets(cpu["torch"]), notes)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", type=Path, help="file that a machine with a GPU has written")
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    options = parser.parse_args()
    rows = options.output.with_suffix("") / ROWS
    gpu = _read(options.gpu) if options.gpu else kept(rows)["gpu"] if rows.exists() else {}
    report = json.loads(_run("-m", "mlxkv", "doctor", "--json").stdout.splitlines()[-1])
    mlx = {name: value for name, value in report.items() if name in MLX}
    measured = {"mlx": mlx, "torch": _torch(), "gpu": gpu}
    options.output.write_text(page_of(measured), encoding="utf-8")
    rows.parent.mkdir(exist_ok=True)
    rows.write_bytes(gzip.compress(json.dumps(measured).encode(), mtime=0))
    files = (measured["torch"], gpu)
    all_rows = [
        *mlx["golden"],
        *(row for f in files for name in TORCH for row in f.get(name) or ()),
    ]
    wrong = sum(not row["ok"] for row in all_rows)
    console.note(f"{len(all_rows)} rows, {wrong} wrong: {options.output}")
    sys.exit(1 if wrong else 0)


def kept(rows: Path) -> dict:
    """Return what a page was made of."""
    return json.loads(gzip.decompress(rows.read_bytes()))


def _torch() -> dict:
    """Return the rows of torch on this CPU and of Triton's interpreter, which runs in a process of its own: it is
    chosen when triton is imported."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        _run("-m", "cuda_track.golden", "--device", "cpu", "--json", path, TRITON_INTERPRET="1")
        return _read(path)


def _run(*words: str | Path, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *words]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    if not process.stdout:
        last = (process.stderr.strip().splitlines() or ["no answer"])[-1]
        raise UserError(f"[parity] {words[1]} does not run here: {last}")
    return process


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"[parity] {str(path)!r} is no JSON of a golden table: {error}") from None


if __name__ == "__main__":
    console.run_tool(main)
