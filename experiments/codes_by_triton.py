"""Check and time codebooks and polar keys by Triton: `python -m experiments.codes_by_triton FILE`, on one NVIDIA GPU.

Golden rows come first, then the time of a token behind 32K and 131,072 tokens, beside KIVI. Rows are written as they
come; those there are not measured again.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from cuda_track import bench
from cuda_track.golden.kernels import codes_rows, encode_rows
from experiments.options import Parser
from mlxkv import console
from mlxkv.errors import UserError

FORMATS = ("int4", "kivi-int2", "turbo-int4", "turbo-int3", "turbo-int2", "polar", "fill")
CASES = ("b1 32k", "b1 128k")


def measure(path: Path, cases: tuple[str, ...] = CASES, formats: tuple[str, ...] = FORMATS) -> None:
    """Append the rows that `path` lacks. Raises UserError, before any is timed, if a golden row is wrong."""
    lines = path.read_text().splitlines() if path.exists() else []
    done = {(row["case"], row["kind"]) for row in map(json.loads, lines) if "kind" in row}
    with path.open("a") as file:

        def write(row: dict) -> None:
            print(json.dumps(row), file=file, flush=True)

        if not lines:
            golden = [*encode_rows(), *codes_rows()]
            if wrong := [str(row) for row in golden if not row.ok]:
                raise UserError(f"[codes_by_triton] golden rows are wrong; got {'; '.join(wrong)}")
            for row in golden:
                write({"golden": row.case, "rms": row.rms, "bound": row.bound})
        for case in cases:
            for name in formats:
                if (case, name) not in done:
                    for row in bench.attention_rows([case], [name]):
                        console.note(str(row))
                        if row.kind == name or (case, row.kind) not in done:
                            write(asdict(row))
                            done.add((case, row.kind))


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("codes_by_triton", __doc__)
    parser.add_argument("rows", type=Path, help="JSON lines")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise UserError("[codes_by_triton] needs an NVIDIA GPU; got none; nothing to choose here")
    torch.set_default_device("cuda")
    measure(options.rows)


if __name__ == "__main__":
    console.run_tool(main)
