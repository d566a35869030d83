"""Trees of arrays: what a model's parameters and a cache's state are."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten


def flat(tree: Any) -> list[tuple[str, mx.array]]:
    """Return the arrays of a tree with their names, "layers.0.weight"."""
    # By mlx's annotations it may be a dict, too: where one is given to be filled.
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))
