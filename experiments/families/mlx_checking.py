"""What one family of mlx-lm does on compressed caches."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from experiments.families.found import INT4, NEW, PROMPT, Family, examined
from experiments.families.mlx_building import NOT_BUILT, VOCABULARY, build
from mlxkv.models import attach, detach


def family(name: str) -> Family:
    return examined(name, NOT_BUILT, build, _written, attach, detach, INT4)


def _written(model: nn.Module) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and their logits [NEW, V], after a prompt in two chunks."""
    text = mx.random.randint(3, VOCABULARY - 20, (1, PROMPT), key=mx.random.key(5))
    caches, tokens, rows = make_prompt_cache(model), [], []
    for part in (text[:, :30], text[:, 30:]):
        out = model(part, cache=caches)
    for _ in range(NEW):
        rows.append(out[:, -1, : VOCABULARY - 1])
        tokens.append(mx.argmax(rows[-1]).item())
        out = model(mx.array([[tokens[-1]]]), cache=caches)
    return tokens, np.array(mx.concatenate(rows).astype(mx.float32))
