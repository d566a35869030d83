"""`python -m cuda_track.golden --device cuda`: the golden table on this machine, Triton's rows too."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from cuda_track import cli, golden
from cuda_track.golden import kernels
from cuda_track.kernels import absent, interpreted


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows for the parity page")
    asked = parser.parse_args()
    on_gpu, by_triton = asked.device != "cpu", absent() is None
    if interpreted() and by_triton:
        import cuda_track.kernels.interpreter  # noqa: F401 (which says how kernels are built)
    with torch.device(asked.device):
        found = {"torch": list(golden.by_set()), "triton": []}
        if by_triton and (on_gpu or interpreted()):
            found["triton"] = [("", row) for table in kernels.TABLES for row in table()]
    rows = [row for part in found.values() for _, row in part]
    for row in rows:
        if not row.ok:
            print(row)
    if asked.json:
        name = torch.cuda.get_device_name() if on_gpu else asked.device
        there = ("torch", "triton") if by_triton else ("torch",)
        packages = ", ".join(f"{n} {version(n)}" for n in there)
        data = {
            kind: [{"set": where, **row.as_dict()} for where, row in part]
            for kind, part in found.items()
        }
        asked.json.write_text(json.dumps({"device": name, "versions": packages, **data}))
    bad, differ = sum(not row.ok for row in rows), sum(row.differ for row in rows)
    print(f"{len(rows)} rows on {asked.device}, {bad} wrong, {differ} codes at a boundary differ")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    cli.run(main)
