"""Try every causal language model of transformers on compressed caches: `python -m experiments.families`.

Each is built small, with random weights: which layers are compressed, whether pages
that lose nothing give the plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

from experiments.families.building import families, family
from experiments.families.found import Survey
from mlxkv import console

SURVEY = Survey(
    name="families",
    library="transformers",
    what="Every causal language model that can be built",
    plain="refused with a reason before `generate`",
    skipped="were not compared.",
    classes=True,
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family)


if __name__ == "__main__":
    console.run_tool(main)
