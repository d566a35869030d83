"""All three studies and the published methods, one reading of each prompt for all of them.

    python -m experiments.frontier.every --models DIR --texts HELD --out OUT

Rows come arm by arm, the most telling first, so a run that is cut leaves whole arms.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.frontier import codes, nested, pages, study
from experiments.frontier.arms import Arm
from experiments.frontier.published import METHODS, Preset
from mlxkv import console


def published() -> list[Arm]:
    return [Arm(name, Preset(name), against=("int2", "fill-2.25")) for name in ("int3", *METHODS)]


def arms() -> list[Arm]:
    """Return what all are compared with, then pages at equal bits, nested codes and codes, published methods, and
    pages by themselves."""
    own = [*codes.references(), *(arm for arm in pages.arms() if ": " in arm.name)]
    own += [*nested.arms(), *codes.arms(), *published(), *pages.arms()]
    return list({arm.name: arm for arm in own}.values())


def main(arguments: Sequence[str] | None = None) -> None:
    study.run("frontier.every", __doc__, arms(), arguments, pages.need)


if __name__ == "__main__":
    console.run_tool(main)
