"""Try every causal language model of transformers on compressed caches: `python -m experiments.families`.

Each is built small, with random weights, in a process of its own: which layers are compressed, whether pages
that lose nothing give the plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

import time
from pathlib import Path

from experiments.families.building import families, not_built
from experiments.families.checking import Family, apart
from experiments.options import Parser, check_out
from mlxkv import console
from mlxkv.errors import MachineError, UserError

# One of each sort, for CI.
SHORT = (
    "bamba",
    "deepseek_v3",
    "falcon",
    "falcon_h1",
    "gemma2",
    "gpt_oss",
    "llama",
    "mamba",
    "mpt",
)
SHORT += ("nemotron_h", "qwen3_next", "xlnet")
SECONDS = 60.0  # for one family
HEAD = """# Families of transformers

Which families of transformers run on compressed caches.

Every causal language model of transformers that can be built small, with random weights in float32, on
compressed caches of [cuda_track](../../cuda_track/README.md): {prompt} tokens read and {new} written greedily.
*Equal*: with pages that lose nothing (sink, pages and windows as ever, numbers in place of codes) tokens are
those of the plain model, and logits within {near:g} of their norm. *int4*: the same text runs.

"""


def page(found: list[Family], command: str) -> str:
    """The table, below counts."""
    from experiments.families.found import NEAR, NEW, PROMPT, ending, row

    built = [one for one in found if not one.skipped]
    some = [one for one in built if one.compressed]
    faults = [one for one in built if one.fault]
    skipped = [one for one in found if one.skipped]
    out = [
        HEAD.format(prompt=PROMPT, new=NEW, near=NEAR),
        f"{len(found)} families: {len(built)} built and compared, {len(some)} of them with compressed "
        f"layers, {len(built) - len(some)} refused with a reason before `generate`; {len(faults)} with a "
        f"fault. {len(skipped)} were not compared.\n",
        "| family | class | compressed | the rest | equal | int4 |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(built, key=lambda one: one.name):
        out.append(row(one, "yes" if one.int4 else "-", one.built))
    return "\n".join([*out, *ending(skipped, command)])


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("families", __doc__)
    add = parser.add_argument
    add("names", nargs="*", help="families, by transformers' names; default: all")
    add("--short", action="store_true", help="the part that CI runs")
    add("--out", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    check_out(args.out)
    there = families()
    for name in args.names:
        if name not in there:
            raise UserError(
                f"[families] transformers has no causal model {name!r}; see its auto classes"
            )
    found = []
    for name in args.names or (SHORT if args.short else there):
        start = time.perf_counter()
        reason = not_built(name)
        found.append(Family(name, skipped=reason) if reason else apart(name, SECONDS))
        one, spent = found[-1], time.perf_counter() - start
        said = one.fault or one.skipped or f"{len(one.compressed)} of {len(one.layers)} compressed"
        console.note(f"{name}: {said} ({spent:.1f} s)")
    command = "python -m experiments.families" + (f" --out {args.out}" if args.out else "")
    text = page(found, command)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    if bad := [one.name for one in found if one.fault]:
        raise MachineError(f"[families] {len(bad)} of {len(found)} have a fault: {', '.join(bad)}")


if __name__ == "__main__":
    console.run_tool(main)
