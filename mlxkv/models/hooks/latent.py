"""Layers with multi-head latent attention (MLA): which caches hold latents, by the structure of the model.

mlx-lm's code for MLA hands a cache the latent of each token and the rotary key that all heads share. It multiplies
the rotary keys itself. Of one new token it attends with absorbed queries to the latents as they are; for several it
makes the keys and values of every head from them, and so needs an array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mlxkv.models.hooks.probe import (
    Findings,
    Handle,
    Misuse,
    Place,
    ProbeCache,
    Shape,
    probe,
)

ABSORBED = ("embed_q", "unembed_out")  # maps of heads to latents and back, in mlx-lm's attention
INDEX = "indexer"  # a sparse index beside them, whose cache has keys of its own (DeepSeek-V3.2)
INDEX_KEYS = "the keys of a sparse index stay in full precision"


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The attention modules of `model` that attend to latents, in the order of layers."""
    found = [
        ([(part.isdigit(), int(part) if part.isdigit() else part) for part in path.split(".")], m)
        for path, m in model.named_modules()
        if all(name in m for name in ABSORBED)
    ]
    return [m for _, m in sorted(found, key=lambda pair: pair[0])]


def find(model: nn.Module, make_cache: Callable[[], list], places: list[Place]) -> Findings | None:
    """Return what the plain caches at `places` hold, for a model with MLA; None for any other.

    The attention function must be rebound.
    """
    modules = modules_of(model)
    if not modules:
        return None
    indexed = any(INDEX in m for m in modules)
    index = [place for place in places if indexed and len(place) > 1 and place[1]]
    found = probe(
        model,
        make_cache,
        [place for place in places if place not in index],
        _IndexedProbe if indexed else LatentProbe,
    )
    found.refused |= dict.fromkeys(index, INDEX_KEYS)
    return found


class LatentProbe(ProbeCache):
    """A cache of latents in a dry run."""

    selects = False

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        if keys.shape[1] != 1 or values.shape[1] != 1:
            raise Misuse("caches keys of several heads beside latents")
        one = Shape(
            1, keys.shape[3], values.shape[3], keys.dtype, latent=True, selects=self.selects
        )
        self.shape = one if self.shape is None else replace(one, queries=self.shape.queries)
        self.offset += keys.shape[2]
        rotary = mx.zeros((1, 1, self.offset, values.shape[3]), values.dtype)
        if self.selects or keys.shape[2] > 1:
            return mx.zeros((1, 1, self.offset, keys.shape[3]), keys.dtype), rotary
        self.waiting = True
        return Handle(self), rotary

    @property
    def mixed_dim(self) -> int:
        return self.shape.key_dim


class _IndexedProbe(LatentProbe):
    selects = True
    keys = mx.zeros(0)  # which the model's code ties to those of its index
