"""`LatentKVCache` against the spec, and the rest of what a cache has to do; batches of it."""

import copy
import pickle
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from methods import stored
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlxkv.cache.attention import attend
from mlxkv.cache.latent import IndexedLatentKVCache, LatentKVCache, decoded
from mlxkv.cache.view import View
from mlxkv.errors import UserError
from mlxkv.formats import state
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import Affine, Codebook
from mlxkv.generate import usage
from mlxkv.patching.mark import register_caches
from mlxkv.spec import affine as spec

RANK, ROTARY, HEADS = 128, 32, 6
SINK, RECENT, PAGE = 16, 32, 32
SCALE = (64 + ROTARY) ** -0.5
SIDES = {
    "channel-int4": Side(Affine(4, 32, axis="channel")),
    "srft-int4": Side(Affine(4, 32, symmetric=True), "srft"),
    "token-int8": Side(Affine(8, 64)),
    "hadamard-int3": Side(Affine(3, 64), "hadamard"),
}


def config(side: Side) -> CacheConfig:
    return CacheConfig(side, side, sink=SINK, recent=RECENT, page=PAGE).of_latents


def coarse(side: Side) -> CacheConfig:
    """The same with rotary keys of 8 bits."""
    return replace(config(side), rotary=8).of_latents


@pytest.fixture(params=[*sorted(SIDES), "srft-int4, rotary 8"])
def cache(request):
    name, _, bits = request.param.partition(", ")
    return LatentKVCache((coarse if bits else config)(SIDES[name]))


def rotary_law(cache, rotary: mx.array) -> np.ndarray:
    """The rotary keys [1, 1, T, N] as the spec says that this cache shows them."""
    exact, total = np.array(rotary, np.float64), rotary.shape[2]
    if cache.config.rotary == 16:
        return exact
    sink, pages = spec.split(total, SINK, RECENT, PAGE)
    return stored(exact, cache.config.values, sink, pages, PAGE)


def plain_cache() -> LatentKVCache:
    return LatentKVCache(config(SIDES["srft-int4"]))


def tokens(count: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Latents of unit mean square, and rotary keys, [1, 1, T, R or N]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, 1, count, RANK)) * np.exp(0.5 * rng.standard_normal(RANK))
    x /= np.sqrt((x**2).mean(-1, keepdims=True))
    return tuple(
        mx.array(y.astype(np.float32)) for y in (x, rng.standard_normal((1, 1, count, ROTARY)))
    )


def fill(cache, pair, chunks):
    at = 0
    for n in chunks:
        out = cache.update_and_fetch(*(x[:, :, at : at + n] for x in pair))
        at += n
    return out


def attended(cache, latents, rotary, seed: int = 5):
    """(attention over what a decode step returned, the queries, the scores of the rotary keys)."""
    rng = np.random.default_rng(seed)
    q, q_pe = (
        mx.array(rng.standard_normal((1, HEADS, 1, n)).astype(np.float32)) for n in (RANK, ROTARY)
    )
    bias = (q_pe * SCALE) @ rotary.swapaxes(-1, -2)
    return attend(q, latents, SCALE, bias), q, bias


@pytest.mark.parametrize("chunks", [(70,), (40, 120, 7)])
def test_a_decode_step_is_what_the_spec_computes(cache, chunks):
    pair = tokens(sum(chunks) + 1)
    fill(cache, pair, (*chunks, 1))
    whole, total = [np.array(x, np.float64) for x in pair], sum(chunks) + 1
    view, rotary = cache.keys_and_values()
    np.testing.assert_allclose(np.array(rotary), rotary_law(cache, pair[1]), atol=2e-6)
    out, q, bias = attended(cache, view, rotary)
    sink, pages = spec.split(total, SINK, RECENT, PAGE)
    assert pages == (cache.store.count if cache.store else 0)
    seen = stored(whole[0], cache.config.keys, sink, pages, PAGE)
    expected = spec.attention(
        np.array(q, np.float64), seen, seen, SCALE, np.array(bias, np.float64)
    )
    assert np.sqrt(np.mean((np.array(out) - expected) ** 2) / np.mean(expected**2)) < 1e-4


def test_one_token_comes_back_as_a_view_and_several_as_an_array(cache):
    pair = tokens(200)
    first, rotary = fill(cache, pair, (90, 60, 40))
    assert isinstance(first, mx.array) and first.shape == (1, 1, 190, RANK)
    assert rotary.shape == (1, 1, 190, ROTARY)
    view, rotary = cache.update_and_fetch(*(x[:, :, 190:191] for x in pair))
    assert isinstance(view, View) and rotary.shape[2] == 191
    again, _ = cache.append(*(x[:, :, 191:192] for x in pair), expands=True)
    out, q, bias = attended(cache, *cache.keys_and_values())
    plain = mx.fast.scaled_dot_product_attention(q, again, again, scale=SCALE, mask=bias)
    assert mx.allclose(out, plain, atol=1e-4)


def test_an_index_gets_an_array_of_every_step():
    cache = IndexedLatentKVCache(config(SIDES["srft-int4"]))
    latents, _ = fill(cache, tokens(131), (130, 1))
    assert isinstance(latents, mx.array) and latents.shape[2] == 131


def test_one_record_serves_as_key_and_value():
    """Codes of the latents once, rotary keys once: no more than their bits, beside windows and spare capacity."""
    cache = LatentKVCache(replace(parse_kv("int4"), rotary=16).of_latents)
    pair = tokens(4096)
    fill(cache, pair, (4096,))
    paged = cache.store.count * cache.config.page
    assert sum(x.nbytes for x in _leaves(cache.store.state)) == paged * RANK * 4.5 / 8
    held = usage.in_use(cache)
    windows = 2 * (4096 - paged + cache.config.page) * (RANK + ROTARY)  # in 16 bits
    exact = windows + 2 * paged * ROTARY
    assert held == paged * RANK * 4.5 / 8 + exact
    assert usage.in_16_bits(cache) == 2 * 4096 * (RANK + ROTARY)
    assert cache.nbytes < 1.15 * (held + 2 * paged * ROTARY)  # of 32 bits here
    cache.trim(4096)
    assert cache.empty() and cache.nbytes == 0


def _leaves(tree) -> list[mx.array]:
    return [x for part in tree.values() for x in part.values()]


@pytest.mark.parametrize("cache", ["channel-int4", "srft-int4, rotary 8"], indirect=True)
@pytest.mark.parametrize("back", [5, 33, 81, 112, 150])
def test_tokens_are_taken_back(cache, back):
    pair, other = tokens(160), tokens(30, seed=3)
    fill(cache, pair, (100, 50, 10))
    before = shown(cache)
    cache.trim(back)
    if 80 < back < 150:  # the exact tokens of these pages are gone
        for x, y in zip(shown(cache), before, strict=True):
            assert mx.abs(x - y[:, :, : 160 - back]).max() < 5e-6
        fill(cache, other, (29, 1))
        assert cache.offset == cache.rotary.shape[2] == 190 - back
        return
    fresh = LatentKVCache(cache.config)
    fill(fresh, pair, (100, 60 - back) if back < 60 else (160 - back,))
    assert cache.offset == fresh.offset == 160 - back
    assert mx.array_equal(cache.rotary, fresh.rotary)
    for one in (cache, fresh):
        fill(one, other, (29, 1))
    found, wanted = (attended(one, *one.keys_and_values())[0] for one in (cache, fresh))
    assert mx.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("cache", ["channel-int4", "srft-int4, rotary 8"], indirect=True)
@pytest.mark.parametrize("left", [48, 70])
def test_going_back_into_a_page_keeps_its_rotary_keys(cache, left):
    pair = tokens(160)
    fill(cache, pair, (160,))
    cache.trim_to(left)
    law = rotary_law(cache, pair[1])
    for one in (cache, LatentKVCache.from_state(cache.state)):
        np.testing.assert_allclose(np.array(one.rotary), law[:, :, :left], atol=2e-6)
    fill(cache, tuple(x[:, :, left:] for x in pair), (160 - left,))
    again = np.array(cache.rotary)  # codes of 8 bits were encoded twice
    np.testing.assert_allclose(again[:, :, :left], law[:, :, :left], atol=2e-2)
    np.testing.assert_allclose(again[:, :, 80:], law[:, :, 80:], atol=2e-6)


def shown(cache) -> tuple[mx.array, mx.array]:
    """All latents and rotary keys as attention sees them."""
    view, rotary = cache.keys_and_values()
    return decoded(view), rotary


def same(one, other) -> bool:
    pairs = (attended(x, *x.keys_and_values())[0] for x in (one, other))
    return mx.array_equal(*pairs).item() and mx.array_equal(one.rotary, other.rotary).item()


@pytest.mark.parametrize("cache", ["channel-int4", "srft-int4, rotary 8"], indirect=True)
@pytest.mark.parametrize(
    ("how", "count"),
    [("file", 150), ("pickle", 40), ("copy", 150), ("deepcopy", 150), ("pickle", 0)],
)
def test_it_is_saved_and_copied(cache, tmp_path, how, count):
    if count:
        fill(cache, tokens(count), (count,))
    if how == "file" and count:
        save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
        register_caches()
        (other,) = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    else:
        made = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy}
        other = made.get(how, copy.deepcopy)(cache)
    assert type(other) is LatentKVCache and other.offset == count
    if not count:
        return
    assert same(cache, other)
    more = tokens(41, seed=2)
    for one in (cache, other):
        fill(one, more, (40, 1))
    assert same(cache, other)


def test_a_state_without_its_rotary_keys_is_refused():
    cache = plain_cache()
    fill(cache, tokens(150), (150,))
    tree = dict(cache.state)
    del tree["rotary"]
    with pytest.raises(UserError, match="parts missing"):
        LatentKVCache.from_state(tree)
    tree = dict(cache.state) | {"rotary": cache.rotary[:, :, :10]}
    with pytest.raises(UserError, match="rotary keys of"):
        LatentKVCache.from_state(tree)


def test_another_model_s_tokens_are_refused():
    cache = plain_cache()
    fill(cache, tokens(20), (20,))
    with pytest.raises(UserError, match="as of another model"):
        cache.update_and_fetch(mx.zeros((1, 1, 1, 64)), mx.zeros((1, 1, 1, ROTARY)))
    with pytest.raises(UserError, match="batch"):
        cache.update_and_fetch(mx.zeros((2, 1, 1, RANK)), mx.zeros((2, 1, 1, ROTARY)))
    assert cache.offset == 20


def test_sequences_of_a_batch_are_as_alone():
    lengths, more = (20, 150, 97), 40
    rows, pairs = [], []
    for i, n in enumerate(lengths):
        rows.append(plain_cache())
        pairs.append(tokens(n + more, seed=i))
        fill(rows[-1], pairs[-1], (n,))
    batch = rows[0].merge(rows)
    for step in range(more):
        new = [
            mx.concatenate(
                [p[i][:, :, n + step : n + step + 1] for p, n in zip(pairs, lengths, strict=True)]
            )
            for i in range(2)
        ]
        assert batch.make_mask(1, return_array=True) is None
        view, rotary = batch.update_and_fetch(*new)
    assert rotary.shape == (3, 1, 150 + more, ROTARY)
    rng = np.random.default_rng(6)
    q, q_pe = (
        mx.array(rng.standard_normal((3, HEADS, 1, n)).astype(np.float32)) for n in (RANK, ROTARY)
    )
    out = attend(q, view, SCALE, (q_pe * SCALE) @ rotary.swapaxes(-1, -2))
    for i, row in enumerate(rows):
        for step in range(more):
            at = lengths[i] + step
            own = row.update_and_fetch(*(x[:, :, at : at + 1] for x in pairs[i]))
        bias = (q_pe[i : i + 1] * SCALE) @ own[1].swapaxes(-1, -2)
        assert mx.allclose(out[i : i + 1], attend(q[i : i + 1], own[0], SCALE, bias), atol=1e-5)
        assert same(batch.extract(i), row)


def test_padded_prompts_of_a_batch():
    """Prompts of one step are padded on the right: padding is not stored, arrays end in zeros."""
    lengths, width = (40, 90, 0), 90
    batch = plain_cache().merge([plain_cache() for _ in lengths])
    pairs = [tokens(width, seed=i) for i in range(3)]
    batch.prepare(lengths=list(lengths), right_padding=[width - n for n in lengths])
    mask = batch.make_mask(width, return_array=True)
    latents, rotary = batch.update_and_fetch(*(mx.concatenate(x) for x in zip(*pairs, strict=True)))
    batch.finalize()
    assert mask.shape == (3, 1, width, width) and latents.shape == (3, 1, width, RANK)
    assert batch.offsets == list(lengths) and not rotary[0, :, 40:].any().item()
    assert mx.array_equal(latents[0, :, :40], pairs[0][0][0, :, :40])
    batch.filter([1])
    assert batch.offsets == [90]


def test_presets_that_make_sense_of_latents():
    for kv, why in [
        ("int8", None),
        ("int4", None),
        ("int3", None),
        ("int2", None),
        ("turbo-int4", None),
        ("centred-int2", "no mean"),
        ("polar", "pairs of RoPE"),
        ("static-0.75", "low rank already"),
        ("oja-0.75", "low rank already"),
        ("int4+keep0.5", "not selected"),
    ]:
        found = parse_kv(kv).why_no_latents
        assert found is None if why is None else why in found
    full = CacheConfig(parse_kv("fp16").keys, Side(Affine(4, 64)))
    assert "keeps in full precision" in full.why_no_latents


def test_rotary_keys_of_8_bits():
    one, exact = parse_kv("int4"), replace(parse_kv("int4"), rotary=16)
    assert one.rotary == 8 == parse_kv("int4/int8").rotary
    for kv in ("int8", "naive-int4", "hadamard-int3", "turbo-int4", "int8/int4"):
        assert parse_kv(kv).of_latents.rotary == 16
    assert one.of_latents.bits_per_value(512, 64) * 576 / 8 == 288 + 64 + 2
    assert one.of_latents.of_latents == one.of_latents != exact.of_latents
    for config in (one.of_latents, exact.of_latents):
        saved = CacheConfig.from_dict(config.as_dict())
        assert saved == config and saved.rotary == config.rotary
    with pytest.raises(UserError, match="8 or 16"):
        replace(one, rotary=4)


@pytest.mark.parametrize("bits", [8, 16])
def test_latents_may_have_no_rotary_keys(bits, tmp_path):
    cache = LatentKVCache(replace(config(SIDES["srft-int4"]), rotary=bits).of_latents)
    with_keys, (latents, rotary) = plain_cache(), tokens(151)
    fill(with_keys, (latents, rotary), (150, 1))
    fill(cache, (latents, rotary[..., :0]), (150, 1))
    assert cache.store.count and cache.keys_and_values()[1].shape == (1, 1, 151, 0)
    assert mx.array_equal(*(decoded(x.keys_and_values()[0]) for x in (cache, with_keys)))
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    register_caches()
    (other,) = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert mx.array_equal(*(decoded(x.keys_and_values()[0]) for x in (cache, other)))


def test_models_without_latents_have_no_rotary_keys_apart():
    """Their files say 16, as those of older versions do."""
    one, exact = parse_kv("int4"), replace(parse_kv("int4"), rotary=16)
    assert one == exact and one.as_dict() == exact.as_dict() and one.as_dict()["rotary"] == 16
    state.check_config(CacheConfig.from_dict(one.as_dict()), one)


@pytest.mark.parametrize("kv", ["turbo-int4", "hadamard-int8", "polar-tree"])
def test_other_methods_hold_latents_too(kv):
    made = parse_kv(kv).of_latents
    cache = LatentKVCache(made)
    pair = tokens(400)
    fill(cache, pair, (399, 1))
    out, q, bias = attended(cache, *cache.keys_and_values())
    exact = mx.fast.scaled_dot_product_attention(q, pair[0], pair[0], scale=SCALE, mask=bias)
    error = mx.sqrt(mx.mean((out - exact) ** 2) / mx.mean(exact**2)).item()
    assert 0 < error < 0.15, error
    assert isinstance(made.keys.quantizer, (Affine, Codebook)) or cache.store.count
