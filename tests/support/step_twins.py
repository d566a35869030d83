"""A model that takes the same tokens by traced steps and without, each into caches of its own."""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from random_models import tokens

from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.presets import PRESETS
from mlxkv.patching.steps import Steps

INT4, INT8 = PRESETS["naive-int4"], PRESETS["naive-int8"]
NEAR = (
    1e-4  # logits of random float32 models, and keys and values: how far rounding takes them apart
)


def small(keys: Side = INT4.keys, values: Side = INT4.values, **windows) -> CacheConfig:
    """Pages that are quantized early."""
    return CacheConfig(keys, values, **{"sink": 4, "recent": 8, "page": 16, **windows})


def steps_of(model) -> Steps:
    """The decode steps of an attached model."""
    return vars(model)["_mlxkv_attachment"].steps


def untraced(model, text: mx.array, caches: list) -> mx.array:
    """The logits of a call that Python builds."""
    steps = steps_of(model)
    before, steps.off = steps.off, "a test"
    try:
        return model(text, cache=caches)
    finally:
        steps.off = before


class Twins:
    """An attached model and two lists of caches, `traced` and `plain`.

    near: how far logits, keys and values may be apart.
    """

    def __init__(self, model, near: float = NEAR):
        self.model, self.near = model, near
        self.traced, self.plain = make_prompt_cache(model), make_prompt_cache(model)

    @property
    def steps(self) -> Steps:
        return steps_of(self.model)

    def read(self, text: mx.array) -> mx.array:
        """Both read tokens [L]; both say the same, and hold the same. Returns the token that follows, [1]."""
        ours = self.model(text[None], cache=self.traced)
        plain = untraced(self.model, text[None], self.plain)
        assert ours.shape == plain.shape and ours.dtype == plain.dtype
        assert mx.abs(ours - plain).max().item() <= self.near
        greedy = mx.argmax(plain[0], axis=-1)
        assert mx.array_equal(mx.argmax(ours[0], axis=-1), greedy)
        return greedy[-1:]

    def speak(self, token: mx.array, count: int) -> mx.array:
        """Both go on greedily for `count` tokens. Returns the token that follows."""
        for _ in range(count):
            token = self.read(token)
        return token

    def each(self, change) -> None:
        """Replace each cache by what `change` makes of it."""
        self.traced, self.plain = [
            [change(one) for one in caches] for caches in (self.traced, self.plain)
        ]

    def compare(self) -> None:
        """Both hold the same, in what is saved of them."""
        for ours, plain in zip(self.traced, self.plain, strict=True):
            same_caches(ours, plain, self.near)


def same_caches(ours, plain, near: float = NEAR, codes: float = 0.0) -> None:
    """Codes and numbers are equal, but for this share of the words of codes; keys and values within `near`."""
    assert type(ours) is type(plain)
    if isinstance(ours, CacheList):
        for one, other in zip(ours.caches, plain.caches, strict=True):
            same_caches(one, other, near, codes)
        return
    assert getattr(ours, "offset", None) == getattr(plain, "offset", None)
    one, other = (dict(tree_flatten(_held(cache))) for cache in (ours, plain))
    assert one.keys() == other.keys()
    for name, x in one.items():
        y = other[name]
        assert x.dtype == y.dtype and x.shape == y.shape, name
        if mx.issubdtype(x.dtype, mx.floating):
            x, y = (np.array(a.astype(mx.float32)) for a in (x, y))
            np.testing.assert_allclose(x, y, atol=near, rtol=near, err_msg=name)
        else:
            assert mx.mean(x != y).item() <= (codes if name.endswith("codes") else 0), name


def _held(cache):
    """What a cache holds, as a tree: of buffers what is in use, the oldest token first."""
    if isinstance(cache, RotatingKVCache):
        used = min(cache.offset, cache.max_size + max(0, cache.keys.shape[2] - cache.max_size))
        return [cache._temporal_order(x)[..., :used, :] for x in (cache.keys, cache.values)]
    if isinstance(cache, KVCache):
        return [x[..., : cache.offset, :] for x in (cache.keys, cache.values)]
    if isinstance(cache, ArraysCache):
        return {str(i): x for i, x in enumerate(cache.cache) if x is not None}
    return cache.state


def prompted(model, count: int = 60, near: float = NEAR) -> tuple[Twins, mx.array]:
    """Twins that have read `count` random tokens, and a token to go on with."""
    twins = Twins(model, near)
    return twins, twins.read(tokens(count))
