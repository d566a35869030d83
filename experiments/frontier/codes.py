"""Codes that waste less at int2's bytes: `python -m experiments.frontier.codes --models DIR --texts HELD --out OUT`.

Searched steps, levels from data, scores corrected for the noise of codes, errors that go on to the next value, a few
exact tokens a page: each alone, then together.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.frontier import study
from experiments.frontier.arms import Arm
from experiments.frontier.coding import Codes
from mlxkv import console

TRIED = {
    "int2": {},
    "int2 steps": {"searched": True},
    "int2 levels": {"levels": True},
    "int2 steps levels": {"searched": True, "levels": True},
    "int2 correct": {"correct": 0.5},
    "int2 correct .1": {"correct": 0.1},
    "int2 diffuse": {"diffuse": 0.5},
    "int2 exact 1": {"exact": 1},
    "int2 exact 2": {"exact": 2},
    "int2 steps correct": {"searched": True, "correct": 0.5},
    "int2 steps levels correct": {"searched": True, "levels": True, "correct": 0.5},
    "int2 steps levels exact 2": {"searched": True, "levels": True, "exact": 2},
    "int3": {"bits": 3},
}


def arms() -> list[Arm]:
    return [Arm(name, Codes(**how)) for name, how in TRIED.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    study.run("frontier.codes", __doc__, arms(), arguments)


if __name__ == "__main__":
    console.run_tool(main)
