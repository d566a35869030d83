"""Compressed sliding windows in replayed steps: pages leave between two steps."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import make, make_mma, make_tiles
from random_models import random_model, tokens
from stepping import NEAR, Twins, same_caches, small, steps_of

from mlxkv.cache.rotating import WindowedKVCache
from mlxkv.cache.view import OPS
from mlxkv.metal import launch
from mlxkv.models import attach, detach, summarise

WINDOW = 128
# How far logits may be apart: with experts a value at a boundary that gets the next code shows in logits.
FAMILIES = {"gemma3_text": NEAR, "gemma4_text": NEAR, "gpt_oss": 0.02}


@pytest.fixture
def windowed():
    """Makes an attached model whose sliding windows are compressed, too."""
    models = []

    def made(family: str, config=None, dtype=mx.float32, **changes):
        model = random_model(family, **{"sliding_window": WINDOW, **changes})
        model.set_dtype(dtype)
        models.append(model)
        reports = attach(model, config or small(), windows=WINDOW)
        assert any("window" in r.kind and r.compressed for r in reports)
        return model, reports

    yield made
    for model in models:
        detach(model)


def rings(twins: Twins) -> list[WindowedKVCache]:
    return [one for one in twins.traced if type(one) is WindowedKVCache]


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_leave_between_steps(windowed, family):
    model, reports = windowed(family)
    assert summarise(reports)[-1] == "decode steps: replayed"
    twins = Twins(model, FAMILIES[family])
    token = twins.read(tokens(60))
    for _ in range(5):
        token = twins.speak(token, 50)
        for ours, plain in zip(twins.traced, twins.plain, strict=True):
            same_caches(ours, plain, max(2e-3, twins.near), codes=0.01)
    assert rings(twins) and min(one.dropped for one in rings(twins)) >= 10 * 16
    assert twins.steps.replayed == 250 and twins.steps.traced < 12
    assert twins.steps.state == "replayed"


def test_several_tokens_at_once_are_by_python_and_so_are_taken_back_ones(windowed):
    model, _ = windowed("gemma3_text")
    twins = Twins(model)
    token = twins.speak(twins.read(tokens(100)), 70)
    for new in (3, 1, 8, 1):
        token = twins.read(mx.concatenate([token, tokens(new - 1)]) if new > 1 else token)
        twins.compare()
    before = twins.steps.replayed
    for caches in (twins.traced, twins.plain):
        for cache in caches:
            assert cache.trim(2) == 2
    token = twins.speak(token, 40)
    twins.each(copy.deepcopy)
    twins.speak(token, 40)
    twins.compare()
    assert twins.steps.replayed == before + 80 and not twins.steps.refused


@pytest.mark.parametrize("factory", (make, make_tiles, make_mma))
def test_kernels_mask_by_the_window(factory):
    """The same bits as of steps that Python builds, by kernels of the emulator, which no trace can hold."""
    with launch.using(factory):
        dtype = mx.float32 if factory is make else mx.float16
        model = random_model("gemma3_text", sliding_window=WINDOW)
        model.set_dtype(dtype)
        attach(model, small(), windows=WINDOW)
        steps_of(model).compiles = False
        cache = make_prompt_cache(model)[0]
        assert type(cache) is WindowedKVCache and cache.plan((64, 64), dtype).body != OPS
        twins = Twins(model, near=0.0)
        token = twins.read(tokens(190))
        twins.speak(token, 20)
        twins.compare()
        assert rings(twins)[0].dropped and twins.steps.replayed == 20
        detach(model)
