"""Try every causal language model of transformers on compressed caches: `python -m experiments.families`.

Each is built small, with random weights: which layers are compressed, whether pages
that lose nothing give the plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

from experiments.families.building import families, family
from experiments.families.found import NEAR, NEW, PROMPT, Survey
from mlxkv import console

HEAD = """# Families of transformers

Which families of transformers run on compressed caches.

Every causal language model of transformers that can be built small, with random weights in float32, on
compressed caches of [cuda_track](../../cuda_track/README.md): {prompt} tokens read and {new} written greedily.
*Equal*: with pages that lose nothing (sink, pages and windows as ever, numbers in place of codes) tokens are
those of the plain model, and logits within {near:g} of their norm. *int4*: the same text runs.

"""


SURVEY = Survey(
    name="families",
    head=HEAD.format(prompt=PROMPT, new=NEW, near=NEAR),
    plain="refused with a reason before `generate`",
    skipped="were not compared.",
    classes=True,
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family)


if __name__ == "__main__":
    console.run_tool(main)
