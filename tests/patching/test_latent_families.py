"""Families with multi-head latent attention (MLA), with random weights in their shapes: which layers are
compressed, and what mlx-lm makes on them."""

import warnings

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from random_models import LATENT_FAMILIES, latent_model, tokens
from small_caches import alone, together

from mlxkv.cache.latent import IndexedLatentKVCache, LatentKVCache
from mlxkv.catalog.reports import summarise
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine
from mlxkv.generate import prompt_cache
from mlxkv.loading.attach import attach, detach
from mlxkv.patching.trees import leaves

WINDOWS = {"sink": 16, "recent": 16, "page": 16}  # small ones, so that pages are quantized early
CHANNEL, TOKEN = Side(Affine(4, 16, axis="channel")), Side(Affine(8, 64))
EAGER, EAGER8 = CacheConfig(CHANNEL, CHANNEL, **WINDOWS), CacheConfig(TOKEN, TOKEN, **WINDOWS)
HYBRIDS = ("kimi_k3", "kimi_linear", "bailing_hybrid", "bailing_moe_v3")


# Of each kind: plain, with a sparse index, beside linear attention in two ways.
SOME = ["deepseek_v3", "deepseek_v32", "kimi_linear", "bailing_moe_v3"]


@pytest.fixture(params=SOME)
def family(request):
    return request.param


@pytest.fixture
def model(family):
    made = latent_model(family)
    yield made
    detach(made)


def logits(model, text: mx.array, decoded: int = 30) -> mx.array:
    """[T, vocabulary] of a prompt in two parts, and steps of one token."""
    cache, start = make_prompt_cache(model), len(text) - decoded
    parts = [model(x[None], cache=cache) for x in (text[: start // 2], text[start // 2 : start])]
    parts += [model(text[None, i : i + 1], cache=cache) for i in range(start, len(text))]
    return mx.concatenate(parts, axis=1)[0]


def divergence(plain: mx.array, other: mx.array) -> mx.array:
    """KL of each position, [T]."""
    p, q = (x - mx.logsumexp(x, -1, keepdims=True) for x in (plain, other))
    return (mx.exp(p) * (p - q)).sum(-1)


def steps(model, text: mx.array, count: int = 12, **options) -> list[int]:
    return [int(token) for token, _ in generate_step(text, model, max_tokens=count, **options)]


def test_reports_name_latents_and_what_stays_exact(family, model):
    found = attach(model, "int4")
    ours = [report for report in found if report.compressed]
    assert [r.index for r in ours] == ([1, 3] if family in HYBRIDS else [0, 1])
    lines = summarise(found)
    said = next(line for line in lines if "latent" in line)
    bits = (64 * 4.5 + 16 * 8 + 16) / 80
    assert f"latent int4, rotary keys int8, {bits:.3g} bits per value" in said
    assert ("sparse index stay in full precision" in said) == (family == "deepseek_v32")
    kind = IndexedLatentKVCache if family == "deepseek_v32" else LatentKVCache
    held = [type(c) for _, c in leaves(make_prompt_cache(model)) if isinstance(c, LatentKVCache)]
    assert held == [kind] * (4 if family == "longcat_flash" else 2)


@pytest.mark.parametrize("family", sorted(LATENT_FAMILIES))
def test_text_is_equal_bit_for_bit_inside_the_window(model):
    text = tokens(60)
    plain, spoken = logits(model, text), steps(model, text)
    attach(model, "int4")
    assert mx.array_equal(logits(model, text), plain)
    assert steps(model, text) == spoken
    assert steps(model, text, prefill_step_size=7) == spoken
    detach(model)
    assert mx.array_equal(logits(model, text), plain)


def test_behind_the_window_the_divergence_is_bounded(model):
    text = tokens(150)
    plain = logits(model, text)
    attach(model, EAGER8)
    found = divergence(plain, logits(model, text))
    assert mx.all(found[:16] < 1e-5)
    assert 0 < found[-30:].mean().item() < 1e-3


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear", "bailing_moe_v3"])
def test_a_batch_says_what_each_says_alone(model):
    prompts, counts = [tokens(n, seed=n).tolist() for n in (70, 20, 130, 45)], [12, 16, 10, 14]
    attach(model, EAGER8)
    assert together(model, prompts, counts) == [
        alone(model, prompt, n) for prompt, n in zip(prompts, counts, strict=True)
    ]


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_presets_that_make_no_sense_say_why(model):
    with pytest.warns(UserWarning, match="a latent is of low rank already"):
        attach(model, "static-0.75")
    with pytest.raises(UserError, match="read as a value, too"):
        attach(model, CacheConfig(Side(Affine(2, 64), "oscar-centred"), TOKEN), strict=True)
    with pytest.raises(UserError, match=r"\[fold\]"):
        attach(model, "oscar-int4", fold=True)


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_keys_are_named_where_values_have_other_bits(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = attach(model, "kivi-int4/int2", strict=True)
    assert (
        "latent kivi-int4/int2 (int4 min-max, group 32 per channel, as its keys)" in found[0].reason
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "kimi_linear"])
def test_a_saved_session_is_checked(model, tmp_path):
    text = tokens(120)
    attach(model, EAGER)
    cache, like, other = (make_prompt_cache(model) for _ in range(3))
    model(text[None], cache=cache)
    model(mx.array([[0]]), cache=like)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache)
    for (_, one), (_, another) in zip(leaves(load_prompt_cache(file)), leaves(like), strict=True):
        prompt_cache.check_path(one, another, 120)
    attach(model, EAGER8)
    model(mx.array([[0]]), cache=(other := make_prompt_cache(model)))
    at = next(i for i, (_, c) in enumerate(leaves(cache)) if isinstance(c, LatentKVCache))
    pair = leaves(load_prompt_cache(file))[at][1], leaves(other)[at][1]
    with pytest.raises(ValueError, match="another configuration"):
        prompt_cache.check_path(*pair, 120)
