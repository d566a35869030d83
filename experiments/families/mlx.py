"""Try every model file of mlx-lm on compressed caches: `python -m experiments.families.mlx`.

Each is built small, with random weights: which layers are compressed, whether pages that lose nothing give the
plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

from experiments.families.found import NEAR, NEW, PROMPT, Survey
from experiments.families.mlx_building import families, family
from mlxkv import console

# One of each sort, for CI.
SHORT = ("gemma2", "gpt_oss", "jamba", "llama", "mamba2", "minimax_m3_vl", "olmo", "stablelm")
HEAD = """# Families of mlx-lm

Which model files of mlx-lm run on compressed caches.

Every model file of mlx-lm, small, with random weights in float32, on compressed caches of mlxkv: {prompt} tokens
read in two chunks and {new} written greedily, on a CPU. *Equal*: with pages that lose nothing (sink, pages and
windows as ever, numbers in place of codes) tokens are those of the plain model, and logits within {near:g} of their
norm. *int4*: the same text runs. Layers with a sliding window stay exact.
"""


SURVEY = Survey(
    name="families.mlx",
    head=HEAD.format(prompt=PROMPT, new=NEW, near=NEAR),
    plain="with none and the reason",
    skipped="do not run here by themselves.",
    kind="file",
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family, SHORT)


if __name__ == "__main__":
    console.run_tool(main)
