"""Try every model file of mlx-lm on compressed caches: `python -m experiments.families.mlx`.

Each is built small, with random weights: which layers are compressed, whether pages that lose nothing give the
plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

import time
from pathlib import Path

from experiments.families.found import NEAR, NEW, PROMPT, Family, ending, row
from experiments.families.mlx_building import families
from experiments.families.mlx_checking import family
from experiments.options import Parser, check_out
from mlxkv import console
from mlxkv.errors import MachineError, UserError

# One of each sort, for CI.
SHORT = (
    "gemma2",
    "gpt_oss",
    "jamba",
    "llama",
    "mamba2",
    "minimax_m3_vl",
    "olmo",
    "plamo",
    "stablelm",
)
HEAD = """# Families of mlx-lm

Which model files of mlx-lm run on compressed caches.

Every model file of mlx-lm, small, with random weights in float32, on compressed caches of mlxkv: {prompt} tokens
read in two chunks and {new} written greedily, on a CPU. *Equal*: with pages that lose nothing (sink, pages and
windows as ever, numbers in place of codes) tokens are those of the plain model, and logits within {near:g} of their
norm. *int4*: the same text runs. Layers with a sliding window stay exact.
"""


def page(found: list[Family], command: str) -> str:
    """The table, below counts."""
    built = [one for one in found if not one.skipped]
    some = [one for one in built if one.compressed]
    faults = [one for one in built if one.fault]
    skipped = [one for one in found if one.skipped]
    out = [
        HEAD.format(prompt=PROMPT, new=NEW, near=NEAR),
        f"{len(found)} files: {len(built)} built and compared, {len(some)} of them with compressed layers, "
        f"{len(built) - len(some)} with none and the reason; {len(faults)} with a fault. {len(skipped)} do not "
        "run here by themselves.\n",
        "| file | compressed | the rest | equal | int4 |",
        "|---|---|---|---|---|",
    ]
    for one in built:
        out.append(row(one, "yes" if one.int4 else "-"))
    return "\n".join([*out, *ending(skipped, command, "file")])


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("families.mlx", __doc__)
    add = parser.add_argument
    add("names", nargs="*", help="families, by their files in mlx_lm/models; default: all")
    add("--short", action="store_true", help="the part that CI runs")
    add("--out", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    check_out(args.out)
    there = families()
    for name in args.names:
        if name not in there:
            raise UserError(f"[families] mlx-lm has no model file; got {name!r}; see mlx_lm/models")
    found = []
    for name in args.names or (SHORT if args.short else there):
        start = time.perf_counter()
        found.append(family(name))
        one, spent = found[-1], time.perf_counter() - start
        said = one.fault or one.skipped or f"{len(one.compressed)} of {len(one.layers)} compressed"
        console.note(f"{name}: {said} ({spent:.1f} s)")
    command = "python -m experiments.families.mlx" + (f" --out {args.out}" if args.out else "")
    text = page(found, command)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    if bad := [one.name for one in found if one.fault]:
        raise MachineError(f"[families] {len(bad)} of {len(found)} have a fault: {', '.join(bad)}")


if __name__ == "__main__":
    console.run_tool(main)
