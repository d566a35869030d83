"""Tokens that are taken back leave what a cache fed with the others alone would hold, where their exact values exist,
and else what was read."""

import warnings
from dataclasses import replace

import mlx.core as mx
import pytest
import torch
from tensors import to_mlx, to_torch

from cuda_track.cache import choose
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.models import attach_model
from cuda_track.models.layers import CompressedLayer
from cuda_track.models.transformers_compat import handed
from experiments.families.building import VOCABULARY, build
from experiments.families.found import EXACT, INT4
from mlxkv.cache.attention import decode_all
from mlxkv.cache.compressed import CompressedKVCache as MLXCache
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import Affine

torch.set_num_threads(1)

PLAIN = CacheConfig(Side(Affine(4, 32)), Side(Affine(2, 32)), sink=16, recent=32, page=32)
CHANNEL = CacheConfig(
    Side(Affine(4, 0, axis="channel")), Side(Affine(4, 64)), sink=0, recent=16, page=32
)
SMALL = {"sink": 16, "recent": 16, "page": 32}
CONFIGS = {
    "affine": PLAIN,
    "channels": CHANNEL,
    "no recent": replace(PLAIN, recent=0),
    "turned": replace(parse_kv("srft-int4"), **SMALL),
    "codebook": replace(parse_kv("turbo-int4"), **SMALL),
}
BATCH, HEADS, DIMS, LONGEST = 2, 2, 64, 600


def data(rows, seed=0):
    """Keys and values of LONGEST tokens for these rows of the batch."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(BATCH, HEADS, LONGEST, DIMS, generator=generator)[rows] for _ in "kv")


def feed(cache, pair, start, stop):
    if stop > start:
        cache.update_and_fetch(*(x[:, :, start:stop] for x in pair))


def test_a_window_is_quantized_by_the_token_that_it_has_no_room_for(subtests):
    for name, config in CONFIGS.items():
        with subtests.test(name=name):
            cache, capacity = CompressedKVCache(config), config.recent_capacity(False)
            feed(cache, data([0]), 0, capacity)
            assert not cache._count_pages
            feed(cache, data([0]), capacity, capacity + 1)
            assert cache._count_pages


def test_taking_a_reply_back_many_times_loses_nothing(subtests):
    """With the windows of the preset; int4's pages also in a pool, whose places come back."""
    for way in [choose.OPS, choose.TRITON]:
        with subtests.test(way=way):
            if way == choose.TRITON:
                pytest.importorskip("cuda_track.kernels.interpreter")
            config, pair = replace(parse_kv("naive-int4"), **SMALL), data([0])
            times = 6 if way == choose.OPS else 3
            with choose.using(way):
                cache, fresh = (CompressedKVCache(config) for _ in "ab")
                feed(fresh, pair, 0, 151)
                feed(cache, pair, 0, 151)
                for _ in range(times):
                    feed(cache, data([0], 1), 0, 31)
                    assert cache.trim(31) == 31
                    wholes = (one.view().whole(torch.float32) for one in (cache, fresh))
                    assert all(map(torch.equal, *wholes))
                feed(cache, data([0], 1), 0, 300)
                assert cache.trim(300) == 300 and cache.offset == 151


def test_a_cleared_cache_is_a_new_one():
    cache, fresh, pair = CompressedKVCache(PLAIN), CompressedKVCache(PLAIN), data([0])
    feed(cache, pair, 0, 300)
    cache.clear()
    assert cache.nbytes == 0
    for one in (cache, fresh):
        feed(one, pair, 100, 160)
        assert one.trim(35) == 35
    assert all(map(torch.equal, *(x.view().whole(torch.float32) for x in (cache, fresh))))


def test_a_row_that_is_chosen_takes_its_own_tokens_back():
    """Rows in another order, and one of them twice: each as if it had been read there."""
    rows = torch.tensor([1, 0, 1])
    pair, cache, fresh = data([0, 1]), CompressedKVCache(PLAIN), CompressedKVCache(PLAIN)
    feed(cache, pair, 0, 300)
    feed(fresh, tuple(x[rows] for x in pair), 0, 300)
    cache.select(rows)
    assert cache.trim(40) == fresh.trim(40) == 40
    feed(cache, tuple(x[rows] for x in pair), 260, 262)
    feed(fresh, tuple(x[rows] for x in pair), 260, 262)
    wholes = (one.view().whole(torch.float32) for one in (cache, fresh))
    assert all(map(torch.equal, *wholes))


def test_rows_that_are_repeated_stand_side_by_side():
    """As transformers expands inputs for several replies."""
    pair, cache = data([0, 1]), CompressedKVCache(PLAIN)
    feed(cache, pair, 0, 40)
    CompressedLayer(cache).batch_repeat_interleave(2)
    keys, _ = cache.view().whole(torch.float32)
    assert torch.equal(keys, pair[0][:, :, :40].repeat_interleave(2, 0))


def test_the_other_track_goes_back_alike(subtests):
    """And reads on: where exact tokens are, and where a page is decoded."""
    for name, config in CONFIGS.items():
        for back in (30, 100, 290):
            with subtests.test(name=name, back=back):
                pair, cache, other = data([0, 1]), CompressedKVCache(config), MLXCache(config)
                for start, stop, taken in ((0, 300, back), (300 - back, 420 - back, 7)):
                    feed(cache, pair, start, stop)
                    other.update_and_fetch(*(to_mlx(x[:, :, start:stop]) for x in pair))
                    assert other.trim(taken) == cache.trim(taken) == taken
                    assert other._count == cache._count and other._count_pages == cache._count_pages
                    for x, y in zip(other._read_recent(), cache._read_recent(), strict=True):
                        torch.testing.assert_close(to_torch(x), y, atol=1e-5, rtol=0)
                view = other.keys_and_values()[0]
                for x, y in zip(
                    decode_all(view, mx.float32), cache.view().whole(torch.float32), strict=True
                ):
                    # A code at a rounding boundary: behind a transform its whole token.
                    assert (to_torch(x) - y).abs().gt(1e-3).float().mean() < 5e-3


# -- the caches of models


def read(model, cache, ids):
    with torch.no_grad():
        return model(ids, **handed(cache)).logits


def ids(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY - 20, (1, count), generator=generator)


def test_crop_refuses_as_a_whole():
    model = build("llama")
    attach_model.attach(model, replace(INT4, keep=0.5))
    cache = attach_model.new_cache(model)
    read(model, cache, ids(100))
    read(model, cache, ids(1, 2))
    with pytest.raises(UserError, match=r"\[cache\] tokens before .*; got 90 to take back") as e:
        cache.crop(-90)
    assert "\n" not in str(e.value)
    assert {layer.cache.offset for layer in cache.layers} == {101}
    cache.crop(-1)
    assert {layer.cache.offset for layer in cache.layers} == {100}


def test_trim_and_read_on_is_a_fresh_cache():
    """Pages that lose nothing, so that logits tell."""
    model = build("llama")
    attach_model.attach(model, EXACT)
    text, cache, fresh = ids(200), attach_model.new_cache(model), attach_model.new_cache(model)
    read(model, fresh, text[:, :90])
    right = read(model, fresh, text[:, 90:91])
    read(model, cache, text)
    for _ in range(5):
        assert cache.trim_to(90) and cache.get_seq_length() == 90
        got = read(model, cache, text[:, 90:91])
        assert (got - right).norm() < 1e-4 * right.norm()
        read(model, cache, ids(70, 3))
    assert cache.trim_to(1) and cache.get_seq_length() == 1  # of the sink
    assert not cache.trim_to(0) and cache.get_seq_length() == 1


def test_trim_to_asks_every_layer(subtests):
    """States cannot go back, windows only before they are full."""
    for family, kept in [("jamba", 0), ("gemma2", 0), ("gemma2", 93)]:
        with subtests.test(family=family, kept=kept):
            model = build(family)
            if family == "gemma2" and not kept:
                for layer in model.model.layers:
                    layer.self_attn.sliding_window = layer.self_attn.sliding_window and 32
                model.config.sliding_window = 32
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attach_model.attach(model, INT4)
            cache = attach_model.new_cache(model)
            read(model, cache, ids(100))
            before = [layer.cache.offset for layer in cache.layers if hasattr(layer, "cache")]
            assert cache.trim_to(93) == bool(kept)
            after = [layer.cache.offset for layer in cache.layers if hasattr(layer, "cache")]
            assert after == ([93] * len(before) if kept else before)
