"""`WindowedKVCache` against mlx-lm's RotatingKVCache: with pages that hold exact numbers, outputs are the same
for prompts in chunks, steps and drafts, alone and in batches."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, load_prompt_cache, save_prompt_cache
from on_emulator import make, make_tiles

import mlxkv.models.hooks  # noqa: F401  its classes are found by mlx-lm
from mlxkv.cache.attention import attend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.rotating import WindowedKVCache
from mlxkv.cache.view import OPS
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Full, Side
from mlxkv.formats.names import parse_kv
from mlxkv.metal import launch

SIZE, DIMS = 96, 64
WINDOWS = {"sink": 0, "recent": 16, "page": 16}
INT8 = replace(parse_kv("naive-int8"), **WINDOWS)
PARTS = {
    "long prompt": [200] + [1] * 60,
    "steps alone": [1] * 200,
    "chunks and drafts": [30, 100, 7, 1, 1, 50, 1, 3, 1] + [1] * 40,
    "whole chunks": [64] * 4 + [1] * 5 + [33, 2, 8, 1],
}


class Lossless(CacheConfig):
    """Pages that hold the numbers themselves."""

    compresses = True


EXACT = Lossless(Side(Full()), Side(Full()), **WINDOWS)


def tokens(n, seed, batch=1, dtype=mx.float32):
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal((batch, h, n, DIMS)), dtype) for h in (4, 2, 2)]


def step(cache, q, k, v, **kwargs):
    """Attention over one update, as a model of mlx-lm does it."""
    mask = cache.make_mask(q.shape[2], **kwargs)
    keys, values = cache.update_and_fetch(k, v)
    if isinstance(keys, mx.array):
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask=mask)
    return attend(q, keys, 0.125, mask)


def off(one, other):
    return mx.abs(one - other).max().item()


@pytest.mark.parametrize("keep", (0, 4))
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
def test_the_window_is_that_of_mlx_lm(keep, parts):
    theirs, ours = RotatingKVCache(SIZE, keep), WindowedKVCache(EXACT.in_window(keep, SIZE))
    for i, n in enumerate(parts):
        given = tokens(n, i)
        assert off(step(ours, *given), step(theirs, *given)) < 2e-6
        assert ours.offset == theirs.offset and ours.size() == theirs.size()
        assert ours.is_trimmable() == theirs.is_trimmable()
    assert ours.dropped >= 96
    held = ours.keys_and_values()[0].tokens
    assert held <= SIZE + EXACT.page


@pytest.mark.parametrize("options", ({"return_array": True}, {"window_size": 40}))
def test_masks_that_models_ask_for(options):
    theirs, ours = RotatingKVCache(SIZE), WindowedKVCache(EXACT.in_window(0, SIZE))
    for i, n in enumerate([20, 5, 100, 1, 1, 60, 9, 1]):
        given = tokens(n, i)
        assert off(step(ours, *given, **options), step(theirs, *given, **options)) < 2e-6


def test_nothing_sealed_is_bit_for_bit():
    theirs, ours = RotatingKVCache(SIZE), WindowedKVCache(INT8.in_window(0, SIZE))
    for i, n in enumerate([20, 1, 1, 8]):
        given = tokens(n, i)
        assert mx.array_equal(step(ours, *given), step(theirs, *given)).item()


def test_memory_stays_below_a_bound():
    ours = WindowedKVCache(replace(parse_kv("int4"), **WINDOWS).in_window(0, 1024))
    peak = 0
    for i in range(40):
        step(ours, *tokens(64, i, dtype=mx.float16))
        peak = max(peak, ours.nbytes)
    share = ours.nbytes / (1024 * 2 * 2 * DIMS * 2)
    assert share < 0.55  # codes, and a live window that grows by 256 tokens
    assert ours.keys_and_values()[0].tokens <= 1024 + 64 + 16
    assert peak < 1.3 * ours.nbytes


def read(parts, config=INT8, keep=0, seed=0):
    ours = WindowedKVCache(config.in_window(keep, SIZE))
    for i, n in enumerate(parts):
        step(ours, *tokens(n, seed + i))
    return ours


def go_on(cache, seed=70):
    return mx.concatenate([step(cache, *tokens(n, seed + n)) for n in (1, 1, 5, 1)], axis=2)


@pytest.mark.parametrize("keep", (0, 4))
@pytest.mark.parametrize("way", ("deep", "shallow", "pickle", "state", "file"))
def test_copies_go_on_alike(way, keep, tmp_path):
    ours = read([150, 1, 1, 40], keep=keep)
    if way == "file":
        save_prompt_cache(str(tmp_path / "one.safetensors"), [ours])
        (other,) = load_prompt_cache(str(tmp_path / "one.safetensors"))
    else:
        other = {
            "deep": deepcopy,
            "shallow": copy,
            "pickle": lambda one: pickle.loads(pickle.dumps(one)),
            "state": lambda one: WindowedKVCache.from_state(one.state),
        }[way](ours)
    assert type(other) is WindowedKVCache and other.dropped == ours.dropped > 0
    expected = go_on(deepcopy(ours))
    assert off(go_on(other), expected) < 1e-6
    assert off(go_on(ours), expected) < 1e-6  # nobody wrote into its arrays


def test_trimming_is_that_of_mlx_lm_as_long_as_nothing_has_left():
    ours = read([80])
    assert ours.is_trimmable() and ours.trim(10) == 10
    assert off(go_on(ours), go_on(read_first(70))) < 1e-6
    assert not read([97]).is_trimmable()


def read_first(count):
    """A cache that read the first `count` of the tokens of `read([80])`."""
    ours = WindowedKVCache(INT8.in_window(0, SIZE))
    step(ours, *(x[:, :, :count] for x in tokens(80, 0)))
    return ours


def test_what_has_left_the_window_is_not_taken_back():
    ours = read([200])
    most = ours.trimmable
    assert 0 < most < 40
    with pytest.raises(UserError, match=f"choose at most {most}, or all 200"):
        ours.trim(most + 1)
    assert ours.offset == 200 and not ours.keeps(199 - most)
    assert ours.trim(most) == most
    fresh = WindowedKVCache(INT8.in_window(0, SIZE))
    step(fresh, *(x[:, :, : 200 - most] for x in tokens(200, 0)))
    assert off(go_on(ours), go_on(fresh)) < 0.02


def test_a_state_that_lacks_tokens_of_its_window_is_refused():
    import json

    tree = read([200]).state
    header = json.loads(np.array(tree["header"]).tobytes())
    header["dropped"] += 16
    header["offset"] -= 16
    tree["header"] = mx.array(np.frombuffer(json.dumps(header).encode(), np.uint8))
    with pytest.raises(UserError, match="cut"):
        WindowedKVCache.from_state(tree)


# -- batches


def test_a_batch_is_as_mlx_lm_batches_it():
    lengths = (150, 60, 101)
    theirs, ours = [], []
    for i, n in enumerate(lengths):
        theirs.append(RotatingKVCache(SIZE))
        ours.append(WindowedKVCache(EXACT.in_window(0, SIZE)))
        for cache in (theirs[-1], ours[-1]):
            step(cache, *tokens(n, i))
    theirs, ours = RotatingKVCache.merge(theirs), WindowedKVCache.merge(ours)
    for i in range(50):
        given = tokens(1, 100 + i, batch=3)
        assert off(step(ours, *given), step(theirs, *given)) < 2e-6
    for cache in (ours, theirs):
        cache.filter([2, 0])
    for i in range(5):
        given = tokens(1, 200 + i, batch=2)
        assert off(step(ours, *given), step(theirs, *given)) < 2e-6
    one = ours.extract(1)
    assert type(one) is WindowedKVCache and one.offset == 150 + 55
    ours.extend(WindowedKVCache.merge([read([70], EXACT)]))
    assert ours.offset.tolist() == [156, 205, 70]
    assert step(ours, *tokens(1, 300, batch=3)).shape == (3, 4, 1, DIMS)


def test_prompts_of_unequal_lengths_are_read_together():
    ours = WindowedKVCache.merge([WindowedKVCache(EXACT.in_window(0, SIZE)) for _ in range(2)])
    alone = [WindowedKVCache(EXACT.in_window(0, SIZE)) for _ in range(2)]
    ours.prepare(lengths=[130, 70], right_padding=[0, 60])
    for i in range(2):
        q, k, v = tokens(65, i, batch=2)
        out = step(ours, q, k, v)
        for row, cache in enumerate(alone):
            n = min(65, (130, 70)[row] - 65 * i)
            got = step(cache, *(x[row : row + 1, :, :n] for x in (q, k, v)))
            assert off(out[row : row + 1, :, :n], got) < 2e-6
    ours.finalize()
    given = tokens(1, 9, batch=2)
    out = step(ours, *given)
    for row, cache in enumerate(alone):
        assert off(out[row : row + 1], step(cache, *(x[row : row + 1] for x in given))) < 2e-6


# -- kernels


@pytest.mark.slow
@pytest.mark.parametrize("factory", (make, make_tiles))
def test_kernels_read_the_window(factory):
    config, dtype = replace(INT8, page=32), mx.float16
    with launch.using(None):
        plain = WindowedKVCache(config.in_window(0, SIZE + 32))
        for i, n in enumerate([170, 20]):
            step(plain, *tokens(n, i, dtype=dtype))
    with launch.using(factory):
        ours = WindowedKVCache(config.in_window(0, SIZE + 32))
        for i, n in enumerate([170, 20]):
            step(ours, *tokens(n, i, dtype=dtype))
        given = tokens(1, 5, dtype=dtype)
        out = step(ours, *given)
        mx.eval(out)
        assert ours.plan((DIMS, DIMS), dtype).body != OPS
    with launch.using(None):
        expected = step(plain, *given)
    assert ours.dropped == plain.dropped > 0
    assert off(out.astype(mx.float32), expected.astype(mx.float32)) < 5e-3


def test_small_windows_and_calibrated_presets_are_refused():
    with pytest.raises(UserError, match="at least 48 tokens; got 40"):
        INT8.in_window(0, 40)
    with pytest.raises(UserError, match="take no calibration"):
        replace(parse_kv("balanced-int2"), **WINDOWS).in_window(0, 4096)
    assert CompressedKVCache(INT8).config.as_dict().get("sliding") is None
    assert CacheConfig.from_dict(INT8.in_window(4, 128).as_dict()) == INT8.in_window(4, 128)
