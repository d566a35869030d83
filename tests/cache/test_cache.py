"""The cache against the spec, and its half of mlx-lm's contract."""

import copy
import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from methods import stored

from mlxkv.cache import stores
from mlxkv.cache.attention import attend
from mlxkv.cache.backends import PortableBackend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Affine, Full
from mlxkv.patching.trees import trim_caches
from mlxkv.spec import affine as ref

SMALL = CacheConfig(Side(Affine(4), "srft"), Side(Affine(4), "srft"), sink=16, recent=32, page=32)
HEADS, KV_HEADS = 6, 2


def tokens(length, dims=64, batch=1, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((batch, KV_HEADS, length, dims)).astype(np.float32)
    keys[..., 5] *= 6
    values = rng.standard_normal((batch, KV_HEADS, length, dims)).astype(np.float32)
    return keys, values


def feed(cache, keys, values, steps):
    """Append in steps; returns the last view."""
    start = cache.offset
    for step in steps:
        part = slice(start, start + step)
        view, _ = cache.update_and_fetch(mx.array(keys[:, :, part]), mx.array(values[:, :, part]))
        start += step
    return view


def seen(cache, dims=64):
    """Keys and values as attention would see them."""
    view, _ = cache.keys_and_values()
    from mlxkv.cache.attention import decode_all

    return tuple(np.array(x) for x in decode_all(view, mx.float32))


DIMS = (64, 80, 96, 128, 192, 256, 512)
# Every preset, by turns at one of the head dims that it takes; calibrated ones: test_calibrated.py.
FITTING = [
    (name, fitting[i % len(fitting)])
    for i, (name, config) in enumerate(PRESETS.items())
    if not config.calibrated and (fitting := [n for n in DIMS if not config.why_not(n, n)])
]


@pytest.mark.parametrize(("name", "dims"), [*FITTING, ("hadamard-int3/srft-int4+g64", 64)])
def test_attention_over_a_growing_cache_follows_the_spec(name, dims):
    config = dataclasses.replace(parse_kv(name), sink=16, recent=32)
    steps = (100, 1, 1, 7, 90, 1, 3, 40)
    keys, values = tokens(sum(steps), dims)
    queries = np.random.default_rng(1).standard_normal((1, HEADS, sum(steps), dims))
    cache, done, errors = CompressedKVCache(config), 0, []
    for step in steps:
        sink, pages = ref.split(done, config.sink, config.recent, config.page)
        done += step
        view = feed(cache, keys, values, [step])
        q = queries[:, :, done - step : done].astype(np.float32)
        mask = "causal" if step > 1 else None
        out = attend(mx.array(q), view, dims**-0.5, mask)
        # New tokens are exact in their own step, also those quantized by it.
        k = stored(keys[:, :, :done], config.keys, sink, pages, config.page)
        v = stored(values[:, :, :done], config.values, sink, pages, config.page)
        spec = ref.attention(q.astype(float), k, v, dims**-0.5, ref.causal_mask(step, done))
        errors.append(np.sqrt(np.mean((np.array(out) - spec) ** 2) / np.mean(spec**2)))
    # A code at a rounding boundary may fall the other way in float32: rare, and small.
    assert np.median(errors) < 3e-4
    assert max(errors) < 1.5e-2


def test_pages_are_quantized_as_the_spec_says():
    keys, values = tokens(400)
    for first in (1, 16, 79, 80, 81, 300):
        cache = CompressedKVCache(SMALL)
        feed(cache, keys, values, [first])
        for _ in range(80):
            sink, pages = ref.split(cache.offset, SMALL.sink, SMALL.recent, SMALL.page)
            view, _ = cache.keys_and_values()
            assert (view.pages.tokens if view.pages else 0) == pages * SMALL.page
            assert (view.sink is not None) == (pages > 0)
            assert view.tokens == cache.offset
            feed(cache, keys, values, [1])


def test_a_window_larger_than_the_text_is_bit_equal_to_the_plain_cache():
    from mlx_lm.models.cache import KVCache

    config = dataclasses.replace(SMALL, recent=10_000)
    keys, values = tokens(700)
    ours, plain = CompressedKVCache(config), KVCache()
    rng = np.random.default_rng(3)
    start = 0
    for step in (300, 1, 1, 5, 290, 1):
        part = slice(start, start + step)
        pair = mx.array(keys[:, :, part]), mx.array(values[:, :, part])
        start += step
        q = mx.array(rng.standard_normal((1, HEADS, step, 64)).astype(np.float32))
        mask = "causal" if step > 1 else None
        out = attend(q, ours.update_and_fetch(*pair)[0], 0.125, mask)
        k, v = plain.update_and_fetch(*pair)
        spec = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
        assert mx.array_equal(out, spec)
    assert ours.nbytes <= plain.nbytes


def test_quantized_tokens_have_no_full_precision_copy_and_nbytes_is_allocated():
    keys, values = tokens(4000, 128)
    cache = CompressedKVCache(
        dataclasses.replace(PRESETS["srft-int4+g64"], sink=16, recent=32, page=32)
    )
    feed(cache, keys.astype(np.float16), values.astype(np.float16), [4000])
    mx.eval(cache.state)
    mx.clear_cache()
    before = mx.get_active_memory()
    kept = cache.nbytes
    assert kept < 0.31 * 4000 * 128 * KV_HEADS * 2 * 2
    del cache
    mx.clear_cache()
    freed = before - mx.get_active_memory()
    assert kept <= freed <= kept * 1.02 + 4096  # what it says is what it holds


def test_a_step_that_quantizes_a_page_copies_no_other_page():
    cache = CompressedKVCache(dataclasses.replace(SMALL, keys=Side(Full())))
    keys, values = (mx.array(x) for x in tokens(4096))
    mx.eval(keys, values)
    extra = 0
    for start in (*range(0, 4000, 500), *range(4000, 4096)):
        stop = start + 500 if start < 4000 else start + 1
        mx.clear_cache()
        capacity, before = cache.store and cache.store.pages.capacity, mx.get_active_memory()
        mx.reset_peak_memory()
        new = cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
        mx.eval(new[0].quantized)
        del new
        mx.eval(cache.state)
        if stop - start == 1 and cache.store.pages.capacity == capacity:
            extra = max(extra, mx.get_peak_memory() - before)
    assert cache.store.pages.count > 120
    assert extra < 0.2 * cache.nbytes


def test_trim_gives_memory_back_and_more_than_all_is_all():
    keys, values = tokens(3000)
    cache = CompressedKVCache(SMALL)
    feed(cache, keys, values, [3000])
    full = cache.nbytes
    assert trim_caches([cache], 3000, 200)
    assert cache.nbytes < 0.3 * full
    assert cache.trim(10_000) > 100
    assert cache.empty()
    assert cache.nbytes == 0
    feed(cache, keys, values, [300])
    assert cache.offset == 300


@pytest.mark.parametrize(
    ("name", "length"),
    (("int4", 333), ("srft-int2+g32", 100), ("hadamard-int3", 333), ("fp16/int4", 5), ("int4", 0)),
)
def test_state_round_trip(name, length):
    keys, values = tokens(500)
    config = dataclasses.replace(parse_kv(name), sink=16, recent=32, page=32)
    cache = CompressedKVCache(config)
    if length:
        feed(cache, keys, values, [length])
    again = CompressedKVCache.from_state(cache.state, cache.meta_state)
    twin = copy.deepcopy(cache)
    assert again.offset == cache.offset
    assert again.config == config
    for other in (again, twin):
        a, b = (feed(c, keys, values, [1] * 40 + [60]) for c in (copy.deepcopy(cache), other))
        q = mx.array(np.random.default_rng(5).standard_normal((1, HEADS, 3, 64)), mx.float32)
        assert mx.array_equal(attend(q, a, 0.125), attend(q, b, 0.125))


def test_states_with_parts_missing_or_cut_are_refused():
    keys, values = tokens(300)
    cache = CompressedKVCache(SMALL)
    feed(cache, keys, values, [300])
    for spoil in (
        lambda s: s.pop("pages"),
        lambda s: s.pop("sink"),
        lambda s: s["pages"]["keys"].pop("scale"),
        lambda s: s["pages"]["keys"].update(codes=s["pages"]["keys"]["codes"][:, :, 1:]),
        lambda s: s["live"].update({n: x[:, :, 1:] for n, x in s["live"].items()}),
        lambda s: s["live"].update({n: x[:, :1] for n, x in s["live"].items()}),
    ):
        state = cache.state
        state["pages"] = {n: dict(side) for n, side in state["pages"].items()}
        spoil(state)
        with pytest.raises(UserError, match="parts missing or cut"):
            CompressedKVCache.from_state(state)


def test_states_that_are_not_ours_are_refused():
    with pytest.raises(UserError, match="not the state of a compressed cache"):
        CompressedKVCache.from_state({"keys": mx.zeros(3)})
    cache = CompressedKVCache(SMALL)
    header = bytes(np.array(cache.state["header"]).tobytes()).replace(
        b'"version": 2', b'"version": 9'
    )
    with pytest.raises(UserError, match="got 9; choose a file of version 2"):
        CompressedKVCache.from_state({"header": mx.array(np.frombuffer(header, np.uint8))})


def test_masks_are_those_of_the_plain_cache():
    from mlx_lm.models.cache import KVCache

    keys, values = tokens(90)
    ours, plain = CompressedKVCache(SMALL), KVCache()
    for _ in range(2):
        for n, window, as_array in (
            (1, None, False),
            (4, None, False),
            (4, None, True),
            (3, 7, False),
        ):
            a = ours.make_mask(n, return_array=as_array, window_size=window)
            b = plain.make_mask(n, return_array=as_array, window_size=window)
            assert mx.array_equal(a, b) if isinstance(b, mx.array) else a == b
        feed(ours, keys, values, [90])
        plain.update_and_fetch(mx.array(keys), mx.array(values))


def test_batches_work_and_a_changed_batch_is_refused():
    keys, values = tokens(200, batch=3)
    cache = CompressedKVCache(SMALL)
    view = feed(cache, keys, values, [199, 1])
    q = np.random.default_rng(2).standard_normal((3, HEADS, 1, 64)).astype(np.float32)
    out = np.array(attend(mx.array(q), view, 0.125))
    for i in range(3):
        one = CompressedKVCache(SMALL)
        view = feed(one, keys[i : i + 1], values[i : i + 1], [199, 1])
        alone = np.array(attend(mx.array(q[i : i + 1]), view, 0.125))
        np.testing.assert_allclose(out[i : i + 1], alone, atol=1e-6)
    with pytest.raises(UserError, match="batch of 3; got 1"):
        feed(cache, keys[:1], values[:1], [0])


def test_models_that_index_the_keys_are_told_so():
    keys, values = tokens(10)
    view = feed(CompressedKVCache(SMALL), keys, values, [10])
    assert view.shape == (1, KV_HEADS, 10, 64)
    with pytest.raises(UserError, match="uses compressed keys as an array; got .transpose"):
        view.transpose(0, 2, 1, 3)


def test_a_store_of_records_is_copied_with_mlx_own_builder():
    """What builds kernels on a GPU is a function of MLX that no copy module knows."""
    store = stores.Records(PRESETS["int4"], (64, 64), PortableBackend(mx.fast.metal_kernel))
    store.pages.append({"records": mx.arange(12).reshape(1, 1, 4, 3)}, 1)
    twin = copy.deepcopy(store)
    assert twin.backend is store.backend and twin.layout == store.layout
    twin.pages.append({"records": mx.zeros((1, 1, 4, 3), mx.int32)}, 1)
    assert (store.count, twin.count) == (1, 2)
    assert mx.array_equal(store.state["records"], mx.arange(12).reshape(1, 1, 4, 3))
