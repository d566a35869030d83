"""Try the language model of every family of mlx-vlm on compressed caches: `python -m experiments.families.vlm`.

Each is built small, with random weights: which layers are compressed, whether pages that lose nothing give the
plain model's logits, whether int4 runs. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from experiments.families.found import INT4, NEAR, NEW, PROMPT, Family, Survey, examined
from experiments.families.vlm_building import UNFIT, VOCABULARY, build, families
from mlxkv import console
from mlxkv.models import attach, detach
from mlxkv.models.hooks.mark import own_make_cache

HEAD = """# Families of mlx-vlm

Which families of mlx-vlm run on compressed caches.

The language model of every family in mlx-vlm that can be built small, with random weights in float32:
{prompt} tokens read and {new} written greedily, on mlx-vlm's own caches and on compressed ones. *Equal*: with pages
that lose nothing (sink, pages and windows as ever, numbers in place of codes) tokens are those of the plain model,
and logits within {near:g} of their norm. *int4*: the same text runs.

"""


def _written(model: nn.Module) -> tuple[list[int], np.ndarray]:
    """Greedy tokens behind the prompt, and their logits [NEW, V]."""
    attached = "make_cache" in vars(model)
    caches = model.make_cache() if attached else own_make_cache(model)()
    step = mx.random.randint(0, VOCABULARY, (1, PROMPT), key=mx.random.key(1))
    tokens, rows = [], []
    for _ in range(NEW):
        out = model(step, cache=caches)
        rows.append(getattr(out, "logits", out)[:, -1].astype(mx.float32))
        tokens.append(mx.argmax(rows[-1]).item())
        step = mx.array([tokens[-1:]])
    return tokens, np.array(mx.concatenate(rows))


def family(name: str) -> Family:
    return examined(name, UNFIT, build, _written, attach, detach, INT4)


SURVEY = Survey(
    name="families.vlm",
    head=HEAD.format(prompt=PROMPT, new=NEW, near=NEAR),
    plain="run as they are, with a reason",
    skipped="were not compared.",
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family)


if __name__ == "__main__":
    console.run_tool(main)
