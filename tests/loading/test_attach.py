"""Attaching: mlx-lm runs unchanged on an attached model, and detaching leaves no trace."""

import sys
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base, gemma3_text, llama
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model, tokens
from samples import rms

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach, detach

# Families whose files have attention code of their own, reached through `patching.patch`.
OWN_CODE = ("gear", "gemma2", "plamo2", "stablelm")
# One of each kind of attention, cache and mask, and these; `experiments.families` runs all of mlx-lm.
KINDS = (*("llama", "phi3", "gemma3_text", "gpt_oss", "gemma4_text", "qwen3_next", "falcon_h1"),)
KINDS += ("minicpm3", *OWN_CODE)
INT4 = PRESETS["naive-int4"]
INT8 = PRESETS["naive-int8"]
WINDOWS = {"sink": 16, "recent": 16, "page": 16}  # small ones, so that pages are quantized early
EAGER, EAGER8 = (CacheConfig(c.keys, c.values, **WINDOWS) for c in (INT4, INT8))


ATTENTION = base.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def nothing_left_behind(unbound):
    yield
    files = [m for name, m in list(sys.modules.items()) if name.startswith("mlx_lm.models.")]
    assert all(getattr(m, ATTENTION.__name__, ATTENTION) is ATTENTION for m in files)


def logits(model, text: mx.array, decoded: int = 3) -> mx.array:
    """[T, vocabulary] of a prefill and `decoded` steps of one token."""
    cache = make_prompt_cache(model)
    parts = [model(text[None, :-decoded], cache=cache)]
    parts += [model(text[None, -i : -i + 1 or None], cache=cache) for i in range(decoded, 0, -1)]
    return mx.concatenate(parts, axis=1)[0]


def steps(model, text: mx.array, count: int = 8, **options) -> list[int]:
    return [int(token) for token, _ in generate_step(text, model, max_tokens=count, **options)]


@pytest.mark.parametrize("family", KINDS)
def test_logits_are_equal_bit_for_bit_inside_the_window(family):
    model, text = random_model(family), tokens(40)
    plain, spoken = logits(model, text), steps(model, text)
    reports = attach(model, "naive-int4")
    assert any(report.compressed for report in reports)
    assert any(
        isinstance(c, CompressedKVCache) or hasattr(c, "caches") for c in make_prompt_cache(model)
    )
    assert mx.array_equal(logits(model, text), plain)
    assert steps(model, text) == spoken
    assert steps(model, text, prefill_step_size=7) == steps(model, text)
    detach(model)
    assert mx.array_equal(logits(model, text), plain)


@pytest.mark.parametrize("family", KINDS)
def test_quantized_pages_are_read(family):
    """Past the window logits differ, by little: the codes were read, not something else."""
    model, text = random_model(family), tokens(150)
    plain = logits(model, text)
    attach(model, EAGER8)
    found = logits(model, text)
    detach(model)
    assert 0 < rms(found[-3:], plain[-3:]) < 0.03


@pytest.mark.parametrize("family", OWN_CODE)
def test_in_a_batch_each_sequence_is_as_alone(family):
    model, texts = random_model(family), [tokens(100, 1)[None], tokens(70, 2)[None]]
    attach(model, replace(EAGER8, sink=4, page=32))
    each = [make_prompt_cache(model) for _ in texts]
    for caches, text in zip(each, texts, strict=True):
        model(text, cache=caches)
    both = [type(one).merge([one, other]) for one, other in zip(*each, strict=True)]
    step = mx.array([[5], [7]])
    alone = mx.concatenate([model(step[i : i + 1], cache=each[i]) for i in range(2)])
    assert rms(model(step, cache=both), alone) < 1e-5
    detach(model)


def test_detach_restores_everything():
    model = random_model("llama")
    original, own, before = llama.scaled_dot_product_attention, model.make_cache, dict(vars(model))
    attach(model, "naive-int4")
    assert llama.scaled_dot_product_attention is not original
    detach(model)
    detach(model)  # once more does nothing
    assert llama.scaled_dot_product_attention is original is base.scaled_dot_product_attention
    assert dict(vars(model)) == before and model.make_cache == own


def test_a_patch_made_after_ours_stays(monkeypatch):
    model = random_model("gemma3_text")
    attach(model, "naive-int4")
    theirs = lambda *args, **kwargs: None  # noqa: E731
    original = base.scaled_dot_product_attention
    gemma3_text.scaled_dot_product_attention = theirs
    detach(model)
    assert gemma3_text.scaled_dot_product_attention is theirs
    gemma3_text.scaled_dot_product_attention = original


def test_strict_refuses_and_leaves_no_trace():
    model = random_model("llama", head_dim=80)
    before = dict(vars(model))
    with pytest.raises(
        UserError,
        match=r"layers 0-1 of llama stay in full precision; got hadamard-int4; keys: hadamard needs",
    ):
        attach(model, "hadamard-int4", strict=True)
    assert dict(vars(model)) == before


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_of_one_family_in_any_order(first):
    models = [random_model("llama", seed) for seed in (0, 1)]
    text, original = tokens(40), llama.scaled_dot_product_attention
    plain = [logits(model, text) for model in models]
    for model in models:
        attach(model, "naive-int4")
    detach(models[first])
    assert llama.scaled_dot_product_attention is not original
    for model, expected in zip(models, plain, strict=True):
        assert mx.array_equal(logits(model, text), expected)
    detach(models[1 - first])
    assert llama.scaled_dot_product_attention is original
