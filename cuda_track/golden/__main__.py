"""`python -m cuda_track.golden --device cuda`: the golden table on this machine, Triton's rows too."""

from __future__ import annotations

import sys
from itertools import chain

import torch

from cuda_track import cli, golden
from cuda_track.golden import kernels


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked, bad, count, differ = parser.parse_args(), 0, 0, 0
    with torch.device(asked.device):
        tables = () if asked.device == "cpu" else kernels.TABLES
        for row in chain(golden.rows(), *(table() for table in tables)):
            count, differ = count + 1, differ + row.differ
            if not row.ok:
                bad += 1
                print(row)
    print(f"{count} rows on {asked.device}, {bad} wrong, {differ} codes at a boundary differ")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    cli.run(main)
