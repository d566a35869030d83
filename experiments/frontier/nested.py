"""Nested codes, 2 + 2 bits: `python -m experiments.frontier.nested --models DIR --texts HELD --out OUT`.

The base is read of all pages, the refinement of some, beside int2, int3 and int4. A row's "accepted" is the share of
drafts that sampling keeps when exact pages verify; the base's is that of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.frontier import study
from experiments.frontier.arms import Arm
from experiments.frontier.coding import Codes
from mlxkv import console

WHOLE, BASE = Codes(4), Codes(4, base=True)


def arms() -> list[Arm]:
    out = [Arm("int2", Codes(2)), Arm("int3", Codes(3)), Arm("int4", Codes(4, plain=True))]
    out += [Arm("nested base", BASE), Arm("nested whole", WHOLE)]
    for share in (0.5, 0.25, 0.125):
        for rank in ("base", "oracle", "diagonal"):
            out.append(Arm(f"nested {rank} {share}", WHOLE, rank, share, 64, "base"))
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    study.run("frontier.nested", __doc__, arms(), arguments)


if __name__ == "__main__":
    console.run_tool(main)
