"""Random walks of append, trim, cut, copy, save and load, against a plain NumPy model of the cache."""

from __future__ import annotations

import copy
from random import Random

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import numpy as np
import pytest
from cache_model import CacheModel

from mlxkv.cache.attention import _whole, attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.formats.config import Affine, CacheConfig, Codebook, PolarTree, Side
from mlxkv.formats.presets import FULL
from mlxkv.models.taking_back import cut_back
from mlxkv.spec import affine as ref

KV_HEADS, KEY_DIM = 2, 64
SIDES = (
    Side(Affine(4), "srft"),
    Side(Affine(8), "hadamard", seed=3),
    Side(Affine(3, 32)),
    Side(Affine(2, 32, symmetric=True), "srft"),
    Side(Affine(4, 16, axis="channel")),
    FULL,
    Side(Codebook(3), "random"),
    Side(PolarTree(), "random"),
    Side(PolarTree(online=True), "random", seed=1),
)
WINDOWS = ((16, 32, 32), (0, 0, 16), (0, 16, 16), (5, 0, 32), (1, 33, 16), (64, 64, 64))
STEPS = 40
LONGEST = 500  # tokens; a longer cache is trimmed before the walk goes on


class Walk:
    """One random walk: a cache, the model of it, and twins of both that were left behind.

    tolerance: largest difference of a value that counts as equal, for the dtype of the walk.
    """

    def __init__(self, seed: int, dtype: mx.Dtype, folder):
        self.random, self.rng = Random(seed), np.random.default_rng(seed)
        self.batch = self.random.choice((1, 1, 2, 3))
        self.heads = KV_HEADS * self.random.choice((1, 3))
        sink, recent, page = self.random.choice(WINDOWS)
        sides = self.random.choice(SIDES), self.random.choice(SIDES)
        self.config = CacheConfig(*sides, sink, recent, page)
        self.value_dim = self.random.choice((KEY_DIM, 80, 128))
        if self.config.why_not(KEY_DIM, self.value_dim):  # no Hadamard matrix of 80
            self.value_dim = KEY_DIM
        self.cache, self.model = CompressedKVCache(self.config), CacheModel(self.config)
        self.dtype, self.file = dtype, str(folder / "cache.safetensors")
        self.tolerance = 1e-5 if dtype == mx.float32 else 2e-2
        self.left_behind: list[tuple[CompressedKVCache, CacheModel]] = []

    def step(self) -> None:
        actions = ["append"] * 6 + ["trim"] * 3 + ["cut", "copy", "return", "state", "save"]
        action = self.random.choice(actions)
        if self.cache.offset > LONGEST:
            action = "cut"
        getattr(self, f"_{action}")()
        assert self.cache.offset == self.cache.size() == self.model.tokens
        assert self.cache.empty() == (self.model.tokens == 0)
        if self.model.tokens:
            self._compare_stored(self.cache, self.model)

    def _append(self) -> None:
        c = self.config
        edge = c.recent + c.page - self.model.live + (0 if self.model.parted else c.sink)
        near = max(1, edge + self.random.choice((-1, 0, 1)))  # tokens until a page is sealed
        new = self.random.choice((1, 1, 2, 8, 9, c.page, near, self.random.randint(1, 150)))
        keys, values = (self._tokens(new, dims) for dims in (KEY_DIM, self.value_dim))
        seen = self.model.append(np.array(keys, np.float64), np.array(values, np.float64))
        view, _ = self.cache.update_and_fetch(keys, values)
        assert view.tokens == seen[0].shape[2] == view.shape[2]

        queries, scale = self._tokens(new, KEY_DIM, self.heads), 2 * KEY_DIM**-0.5
        causal = ref.causal_mask(new, view.tokens)
        mask, spec_mask = self._mask(causal)
        sinks = self.rng.standard_normal(self.heads) if self.random.random() < 0.2 else None
        out = attend(queries, view, scale, mask, None if sinks is None else self._array(sinks))
        exact = np.array(queries, np.float64)
        spec = ref.attention(exact, *seen, scale, spec_mask, sinks)
        error = np.abs(np.array(out, np.float64) - spec)
        assert error.max() < self.tolerance

    def _mask(self, causal: np.ndarray):
        """A mask for `attend` and the same for the spec, in one of the forms that models use."""
        kind = self.random.choice(("causal", "boolean", "window", "additive", "batched"))
        if kind == "causal":
            return ("causal" if len(causal) > 1 else None), causal
        if kind == "window":
            causal = causal & ref.causal_mask(*causal.shape, window=70)
        if kind == "batched":  # [B, 1, L, T], a part of the past hidden in each row
            hidden = self.rng.random((self.batch, 1, 1, causal.shape[1] - len(causal))) < 0.3
            hidden = np.pad(hidden, [(0, 0)] * 3 + [(0, len(causal))])
            causal = causal & ~hidden
        if kind == "additive":
            values = np.where(causal, self.rng.standard_normal(causal.shape), -1e4)
            array = self._array(values)
            return array, np.array(array, np.float64)
        return mx.array(causal), causal

    def _trim(self) -> None:
        most, page = self.model.tokens, self.config.page
        some = (0, 1, 3, page, page + 1, 2 * page, self.random.randint(0, most + 5))
        count = self.random.choice(some)
        assert self.cache.trim(count) == min(count, most)
        self.model.cut(max(0, most - count))

    def _cut(self) -> None:
        """As a session does."""
        most = self.model.tokens
        left = self.random.randint(0, most)
        if not cut_back([self.cache], most, left):
            assert left == 0  # it has not changed: a session starts anew
            self.cache.cut(0)
        self.model.cut(left)

    def _copy(self) -> None:
        """Goes on with the copy or with the original; the other one must not change."""
        pair = [(self.cache, self.model), (copy.deepcopy(self.cache), copy.deepcopy(self.model))]
        self.random.shuffle(pair)
        (self.cache, self.model), other = pair
        self.left_behind.append(other)

    def _return(self) -> None:
        if self.left_behind:
            self.left_behind.append((self.cache, self.model))
            index = self.random.randrange(len(self.left_behind))
            self.cache, self.model = self.left_behind.pop(index)

    def _state(self) -> None:
        self.cache = CompressedKVCache.from_state(self.cache.state)

    def _save(self) -> None:
        mlx_cache.save_prompt_cache(self.file, [self.cache])
        (self.cache,) = mlx_cache.load_prompt_cache(self.file)

    def finish(self) -> None:
        for cache, model in self.left_behind:
            if model.tokens:
                self._compare_stored(cache, model)

    def _compare_stored(self, cache, model) -> None:
        """What is stored is what the model says; from here on the model holds the very same."""

        view, _ = cache.keys_and_values()
        assert (view.pages.tokens if view.pages else 0) == model.pages * self.config.page
        stored = tuple(np.array(x, np.float64) for x in _whole(view, self.dtype))
        for ours, spec in zip(stored, model.seen, strict=True):
            error = np.abs(ours - spec).max(-1)  # [B, G, T]
            # A code at a rounding boundary may fall the other way, for one token here and there,
            # or for the 16 that share a scale per channel; never for a page of all heads.
            assert (error > self.tolerance).sum() <= 32 + 0.02 * error.size
            exact = max(spec.shape[2] - model.live, model.decoded)
            assert error[:, :, exact:].max(initial=0) == 0
            assert error[:, :, : model.sink].max(initial=0) == 0
        model.seen = stored

    def _tokens(self, count: int, dims: int, heads: int = KV_HEADS) -> mx.array:
        return self._array(self.rng.standard_normal((self.batch, heads, count, dims)))

    def _array(self, x: np.ndarray) -> mx.array:
        return mx.array(x).astype(self.dtype)


@pytest.mark.parametrize("seed", range(8))
def test_any_walk_gives_what_the_model_says(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(mlx_cache, "CompressedKVCache", CompressedKVCache, raising=False)
    walk = Walk(seed, mx.float16 if seed % 4 == 3 else mx.float32, tmp_path)
    for _ in range(STEPS):
        walk.step()
    walk.finish()
