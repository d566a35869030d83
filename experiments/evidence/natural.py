"""Measure presets on many texts: `python -m experiments.evidence.natural --help`.

For each model, preset and text of HELD/test: CONTEXT tokens are read as a prompt, DECODE more eight at a
time, and every next-token distribution is compared with full precision's. For each document (text of
HELD/haystack with planted facts): questions about one key, and about four. Calibrated presets are
calibrated on HELD/calibration. Results are lines of OUT/rows.jsonl; what is there is not measured again,
so a run that was stopped goes on. `page` makes tables and a picture of it.

--processes N starts N processes with a share each, on GPUs in turn; on several hosts use --shares I/N and
read all files together. Without --texts the small models of the tests read stories of their own world.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.evidence import corpus
from experiments.evidence.command import execute, options
from experiments.evidence.selection import chosen_names
from experiments.options import words
from mlxkv import console
from mlxkv.eval.arms import BASELINE

PRESETS = (
    "int4", "int3", "int2", "oscar-int2", "kivi-int4", "kivi-int2", "kvarn-int2", "turbo-int4",
    "turbo-int3", "turbo-int2", "polar", "polar-int2", "polar-tree", "hadamard-int4",
    "hadamard-int2", "srft-int4", "naive-int4", "naive-int3", "naive-int2",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = options("evidence.natural", __doc__)
    parser.add_argument("--split", default=corpus.TEST, choices=corpus.SPLITS)
    parser.add_argument("--kv", type=words, default=PRESETS, help="presets by commas")
    parser.add_argument("--and", dest="more", type=words, default=(), help="presets to add to --kv")
    parser.add_argument(
        "--chosen", type=Path, help="what selection chose: settings to add to --kv, by model"
    )
    args = parser.parse_args(given)
    presets = {}
    for model in args.models:
        names = [BASELINE, *args.kv, *args.more]
        if args.chosen:
            names += chosen_names(args.chosen, Path(model).name)
        presets[model] = list(dict.fromkeys(names))
    execute(args, given, "natural", presets, (args.split,))


if __name__ == "__main__":
    console.run_tool(main)
