"""`python -m cuda_track.golden --device cuda`: compute the golden table on this machine, by torch and by Triton."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from importlib.metadata import version
from pathlib import Path

import torch

from cuda_track.golden import kernels
from cuda_track.golden.table import TABLE
from cuda_track.kernels import interpreted
from cuda_track.kernels.launch import absent
from mlxkv import console


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows for the parity page")
    options = parser.parse_args()
    device, by_triton = torch.device(options.device), absent() is None
    if interpreted() and by_triton:
        import cuda_track.kernels.interpreter  # noqa: F401 (it decides how kernels are built)
    rows_by = {"torch": [], "triton": []}
    with device:
        rows_by["torch"] = list(TABLE.by_set())
        if by_triton and (device.type == "cuda" or interpreted()):
            rows_by["triton"] = [("", row) for table in kernels.TABLES for row in table()]
    rows = [row for part in rows_by.values() for _, row in part]
    for row in rows:
        if not row.ok:
            print(row)
    if options.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else options.device
        packages_here = ("torch", "triton") if by_triton else ("torch",)
        packages = ", ".join(f"{n} {version(n)}" for n in packages_here)
        data = {
            kind: [{"set": name, **row.as_dict()} for name, row in part]
            for kind, part in rows_by.items()
        }
        options.json.write_text(json.dumps({"device": name, "versions": packages, **data}))
    bad, differ = sum(not row.ok for row in rows), sum(row.differ for row in rows)
    print(f"{len(rows)} rows on {options.device}, {bad} wrong, {differ} codes at a boundary differ")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    console.run_tool(main)
