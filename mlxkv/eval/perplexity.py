"""Perplexity with the cache in the loop: a long prefix is read, the rest is decoded behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from random import Random

import mlx.core as mx

from mlxkv.eval import feed
from mlxkv.eval.worlds import stories


@dataclass(frozen=True)
class Perplexity:
    """loss: mean negative log likelihood per token, in nats, over `tokens` tokens."""

    loss: float
    tokens: int

    @property
    def value(self) -> float:
        return exp(self.loss)


def story_tokens(loaded, count: int, seed: str = "perplexity") -> list[int]:
    """`count` tokens of held-out stories."""
    tokens, source = [], stories(Random(seed))
    while len(tokens) < count:
        tokens += loaded.tokenizer.encode(next(source) + "\n\n", add_special_tokens=False)
    return tokens[:count]


def perplexity(
    loaded, tokens: list[int], prefix: int, progress: Callable[[int], None] | None = None
) -> Perplexity:
    """Of tokens[prefix:], decoded behind a cache that holds tokens[:prefix]."""
    cache = feed.prefill(loaded, tokens[: prefix - 1])
    total, count = 0.0, 0
    step = 32 * feed.DECODE
    for start in range(prefix - 1, len(tokens) - 1, step):
        part = tokens[start : min(start + step, len(tokens) - 1)]
        logs = feed.log_probabilities(loaded, cache, part)
        target = mx.array(tokens[start + 1 : start + 1 + len(part)])[:, None]
        total -= mx.take_along_axis(logs, target, axis=-1).sum().item()
        count += len(part)
        if progress:
            progress(len(part))
    return Perplexity(total / count, count)
