"""Codes that waste less at the same bytes: `python -m experiments.frontier.codes --models DIR --texts HELD --out OUT`.

Searched steps, levels from data, scores corrected for the noise of codes, errors that go on to the next value, a few
exact tokens a page: each alone, then together, over int2 and over bits by direction. Bits are equal but where a name
says "more": there the same codes pay for exact tokens with 0.1 or 0.2 bits more.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.frontier import study
from experiments.frontier.arms import Arm
from experiments.frontier.coding import Codes
from experiments.frontier.filled import Filled
from mlxkv import console

INT2 = {
    "int2 steps": {"searched": True},
    "int2 levels": {"levels": True},
    "int2 steps levels": {"searched": True, "levels": True},
    "int2 correct .5": {"correct": 0.5},
    "int2 correct .1": {"correct": 0.1},
    "int2 diffuse .5": {"diffuse": 0.5},
    "int2 diffuse .25": {"diffuse": 0.25},
    "int2 exact 1 more": {"exact": 1},
    "int2 exact 2 more": {"exact": 2},
    "int2 steps correct": {"searched": True, "correct": 0.5},
    "int2 steps levels correct": {"searched": True, "levels": True, "correct": 0.5},
    "int2 steps levels exact 2 more": {"searched": True, "levels": True, "exact": 2},
}
RATE = 2.25
FILL = {
    "fill steps": {"searched": True},
    "fill levels": {"levels": True},
    "fill steps levels": {"searched": True, "levels": True},
    "fill correct .5": {"correct": 0.5},
    "fill lost .5": {"lost": 0.5},
    "fill diffuse .5": {"diffuse": 0.5},
    "fill diffuse .25": {"diffuse": 0.25},
    "fill exact 1": {"exact": 1},
    "fill exact 2": {"exact": 2},
    "fill steps levels lost": {"searched": True, "levels": True, "lost": 0.5},
}


def paying(rate: float, exact: int) -> float:
    """Return the rate of codes that leaves room for so many exact tokens a page of 128."""
    return (rate - exact * 16 / 128) / (1 - exact / 128)


def references() -> list[Arm]:
    """Return what everything is compared with."""
    return [
        Arm("int2", Codes(2), ask=True),
        Arm("fill-2.25", Filled(RATE), against=("int2",), ask=True),
        Arm("int4", Codes(4, plain=True), against=("int2",), ask=True),
        Arm("fill-4.5", Filled(4.5), against=("int4",), ask=True),
        Arm("fill-3", Filled(3.0), against=("fill-2.25",)),
        Arm("fill-2.5", Filled(2.5), against=("fill-2.25",)),
    ]


def arms() -> list[Arm]:
    out = references()[:2]
    for name, how in FILL.items():
        rate = paying(RATE, how.get("exact", 0))
        out.append(Arm(name, Filled(rate, **how), against=("fill-2.25", "int2")))
    out += [Arm(name, Codes(**how), against=("int2", "fill-2.25")) for name, how in INT2.items()]
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    study.run("frontier.codes", __doc__, arms(), arguments)


if __name__ == "__main__":
    console.run_tool(main)
