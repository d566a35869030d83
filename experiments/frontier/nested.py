"""Nested codes: `python -m experiments.frontier.nested --models DIR --texts HELD --out OUT`.

The base is read of all pages, the refinement of some: 2 + 2 bits behind balanced maps, and bits by direction whose
refinement adds 0, 1 or 2 bits to each direction, beside int2, int4 and bits by direction at the same bits read. A row's
"accepted" is the share of drafts that sampling keeps when exact pages verify; the base's is that of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.frontier import study
from experiments.frontier.arms import Arm
from experiments.frontier.codes import references
from experiments.frontier.coding import Codes
from experiments.frontier.filled import Filled
from mlxkv import console

WHOLE, BASE = Codes(4), Codes(4, base=True)
# Base and whole, in bits a value: read with a half, a quarter and an eighth of the refinement.
TREES = ((2.0, 4.0), (1.6, 2.9))


def arms() -> list[Arm]:
    out = references()
    for base, whole in TREES:
        codes, name = Filled(base, whole), f"nested fill {base:g}+{whole - base:g}"
        out.append(Arm(f"{name} base", Filled(base, whole, base=True), against=("fill-2.25",)))
        out.append(Arm(f"{name} whole", codes, against=("fill-3", "int4")))
        for share in (0.5, 0.25, 0.125):
            against = _equal(base + share * (whole - base))
            for rank in ("base", "oracle"):
                ask = rank == "base" and against == ("fill-2.25", "int2")
                out.append(
                    Arm(f"{name} {rank} {share}", codes, rank, share, 64, "base", against, ask)
                )
    out += [Arm("nested base", BASE, against=("int2",)), Arm("nested whole", WHOLE)]
    for share in (0.5, 0.25, 0.125):
        for rank in ("base", "diagonal", "turned", "mean", "oracle"):
            against, ask = _equal(2.25 + 2 * share), share < 0.5 and rank in ("base", "diagonal")
            out.append(Arm(f"nested {rank} {share}", WHOLE, rank, share, 64, "base", against, ask))
    return out


def _equal(bits: float) -> tuple[str, ...]:
    """Return the arms of at most about so many bits that read every page once."""
    return ("fill-3",) if bits > 2.9 else ("fill-2.5",) if bits > 2.4 else ("fill-2.25", "int2")


def main(arguments: Sequence[str] | None = None) -> None:
    study.run("frontier.nested", __doc__, arms(), arguments)


if __name__ == "__main__":
    console.run_tool(main)
