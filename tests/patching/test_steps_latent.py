"""Decode steps over latents (MLA) that are replayed equal those that Python builds, by kernels to the last bit."""

import copy
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, make_prompt_cache
from on_emulator import make_mma, make_tiles
from random_models import latent_model, tokens
from step_twins import Twins, steps_of, untraced

from mlxkv.cache.backends import LatentBackend
from mlxkv.cache.latent import LatentKVCache
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import Affine
from mlxkv.loading.attach import attach, detach
from mlxkv.metal import launch

pytestmark = pytest.mark.usefixtures("trusted")

WINDOWS = {"sink": 4, "recent": 8, "page": 16}
TOKEN, CHANNEL = Side(Affine(4, 32), "srft"), Side(Affine(4, 16, axis="channel"))
INDEXED = "no static form of IndexedLatentKVCache"


def config_of(side: Side = TOKEN, **more) -> CacheConfig:
    return CacheConfig(side, side, **(WINDOWS | more))


@pytest.fixture
def attached(attached):
    """Makes an attached model of a family, with these pages."""

    def made(family: str, config=None, **changes):
        return attached(family, config or config_of(), latent_model, **changes)

    return made


def latents_of(twins: Twins) -> list[LatentKVCache]:
    flat = (one for cache in twins.traced for one in getattr(cache, "caches", (cache,)))
    return [cache for cache in flat if isinstance(cache, LatentKVCache)]


@pytest.mark.parametrize("family", ("kimi_k3", "longcat_flash"))
def test_families_are_replayed(family, attached):
    model = attached(family)
    twins = Twins(model)
    token = twins.read(tokens(60))
    token = twins.speak(token, 20)
    twins.compare()
    assert steps_of(model).replayed >= 18 and not steps_of(model).refused
    assert all(cache.store.count > 3 for cache in latents_of(twins))


def test_a_sparse_index_is_not(attached):
    model = attached("deepseek_v32")
    twins = Twins(model)
    twins.speak(twins.read(tokens(60)), 3)
    assert list(steps_of(model).refused.values()) == [INDEXED]


@pytest.mark.parametrize(
    "config",
    [
        config_of(CHANNEL, rotary=8, sink=0),
        replace(parse_kv("turbo-int4"), rotary=8, **WINDOWS),
    ],
    ids=("channel rotary 8 no sink", "turbo rotary 8"),
)
def test_formats_are_replayed_past_quantizing_and_capacity(config, attached):
    """Past the first capacity of pages of 16 tokens, so that arrays grow and another trace is made."""
    twins = Twins(attached("glm4_moe_lite", config, num_hidden_layers=1))
    token = twins.read(tokens(60))
    twins.speak(token, 110)
    twins.compare()
    steps = twins.steps
    assert 0 < steps.traced < 6 and steps.replayed > 100 and not steps.refused


def test_drafts_trims_copies_and_saved_caches_between_replayed_steps(attached):
    twins = Twins(attached("deepseek_v3"))
    token = twins.speak(twins.read(tokens(60)), 5)
    token = twins.read(mx.concatenate([token, tokens(3)]))  # a draft: built by Python
    assert "several tokens" in twins.steps.waits_for
    token = twins.speak(token, 3)
    for cache in (*twins.traced, *twins.plain):
        assert cache.trim(2) == 2
    token = twins.speak(token, 12)
    twins.each(copy.deepcopy)
    token = twins.speak(token, 12)
    twins.each(lambda cache: type(cache).from_state(cache.state))
    twins.speak(token, 12)
    twins.compare()
    assert not twins.steps.refused and twins.steps.replayed > 35


@pytest.mark.parametrize(("family", "rotary"), [("deepseek_v3", 16), ("longcat_flash", 8)])
def test_sequences_of_other_lengths_in_a_batch(family, rotary, attached):
    model = attached(family, config_of(rotary=rotary))
    steps = steps_of(model)
    texts = [tokens(count, seed=count) for count in (60, 75, 131)]

    def batch() -> list:
        caches = [make_prompt_cache(model) for _ in texts]
        for text, own in zip(texts, caches, strict=True):
            model(text[None], cache=own)
        return [merged(each) for each in zip(*caches, strict=True)]

    def merged(each):
        if isinstance(each[0], CacheList):
            return CacheList(
                *(merged(parts) for parts in zip(*(c.caches for c in each), strict=True))
            )
        return type(each[0]).merge(list(each))

    ours, plain = batch(), batch()
    token, before = mx.array([[5], [6], [7]]), steps.replayed
    for _ in range(10):
        one, other = model(token, cache=ours), untraced(model, token, plain)
        assert mx.abs(one - other).max().item() < 1e-4
        token = mx.argmax(other[:, -1:], axis=-1)
    assert steps.replayed - before == 10 and not steps.refused


@pytest.mark.parametrize(
    ("body", "dtype", "rotary"), [(make_tiles, mx.float32, 16), (make_mma, mx.float16, 8)]
)
def test_the_kernel_with_lengths_from_an_array_gives_the_same_bits(body, dtype, rotary):
    """In the emulator, which no trace can hold: the same code, not traced."""
    model = latent_model("glm4_moe_lite", num_hidden_layers=1, first_k_dense_replace=1)
    model.set_dtype(dtype)
    with launch.using(body):
        attach(model, config_of(Side(Affine(4, 32)), rotary=rotary))
        try:
            steps_of(model).compiles = False
            twins = Twins(model, 0.0)
            twins.read(tokens(60))
            assert isinstance(twins.traced[0].store.backend, LatentBackend)
            for i in range(20):
                twins.read(tokens(1, seed=i))
            twins.compare()
            assert twins.steps.replayed == 20 and not twins.steps.refused
        finally:
            detach(model)
