"""Scales per channel in kernels: page headers, their records, and every kernel that reads them."""

import mlx.core as mx
import numpy as np
import pytest
from on_emulator import make
from test_kernels import data, rms, softmax

from mlxkv import attention, records
from mlxkv.attention import attend
from mlxkv.cache import CompressedKVCache, View
from mlxkv.config import Affine, CacheConfig, DualScale, Polar, Side, parse_kv
from mlxkv.metal import launch
from mlxkv.presets import PRESETS
from mlxkv.sealed import Codes, Records

# keys, values, page: scales per channel, or per token, with and without one more scale
FORMATS = {
    "kivi": (Affine(2, 32, axis="channel"), Affine(2, 32), 64),
    "kvarn": (DualScale(4, "channel"), DualScale(2, "token"), 64),
    "swapped": (DualScale(3, "token"), DualScale(3, "channel"), 32),
    "symmetric": (Affine(3, 16, True, axis="channel"), Affine(4, 32, True, axis="channel"), 32),
    "polar": (Polar(4, 4), Affine(4, 64), 64),
    "polar-int3": (Polar(3, 3), Affine(2, 32), 128),
    "polar-kvarn": (Polar(2, 2), DualScale(2, "token"), 64),
    "mixed": (Affine(8, 64), DualScale(8, "token"), 32),
}


# Pairs of 80 dims have no record.
CASES = [(n, d) for n in FORMATS for d in (64, 80, 128) if d != 80 or "polar" not in n]


def stores(name, dims, pages=3, heads=2, transform="none"):
    """(pages as records, the same as codes) of a format."""
    keys, values, page = FORMATS[name]
    config = CacheConfig(Side(keys, transform), Side(values, transform), page=page)
    pair = tuple(mx.array(data(1, heads, pages * page, dims, seed=i)) for i in range(2))
    ours, plain = Records(config, (dims, dims), make), Codes(config, (dims, dims))
    for store in (ours, plain):
        store.append(pair, 1)
        store.append(pair, pages - 1, page)
    return ours, plain


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_records_and_headers_hold_the_same_as_codes(name, dims):
    ours, plain = stores(name, dims)
    words, shared = ours.state["records"], ours.state["headers"]
    layout, page = ours.layout, ours.config.page
    assert words.shape == (1, 2, 3 * page // 16, layout.words)
    assert shared.shape == (1, 2, 3, layout.header_words)
    back = Codes(ours.config, (dims, dims))
    back.restore(ours.state, 3)
    for side in ("keys", "values"):
        for key, x in plain.state[side].items():
            assert mx.array_equal(back.state[side][key], x), (side, key)
    again = Records(ours.config, (dims, dims), make)
    again.restore(plain.state, 3)
    assert mx.array_equal(again.state["records"], words)
    assert mx.array_equal(again.state["headers"], shared)


def test_nothing_is_stored_twice():
    """At whole blocks of dims records and headers take what the codes of plain ops take."""
    for name in FORMATS:
        ours, plain = stores(name, 128)
        assert sum(x.nbytes for x in ours.arrays()) == sum(x.nbytes for x in plain.arrays()), name
    assert PRESETS["kvarn-int2"].bits_per_value(128, 128) == 2.375


@pytest.mark.parametrize(("name", "dims"), [case for case in CASES if case[1] < 128])
def test_unseal_is_its_twin(name, dims):
    ours, plain = stores(name, dims)
    live = mx.array(data(1, 2, 5, dims, seed=7))
    for side in (0, 1):
        for start, stop in ((0, 3), (1, 2)):  # a cut of the buffer has headers of its own
            found, right = (
                s.read(start, stop).between(None, (live, live))[side] for s in (ours, plain)
            )
            assert found.shape == right.shape
            assert rms(found, right) < 3e-6


@pytest.mark.parametrize(
    ("name", "dims", "heads", "new", "dtype", "sinks"),
    [
        ("kivi", 64, 4, 1, mx.float16, False),
        ("kivi", 80, 6, 3, mx.float32, True),
        ("kvarn", 128, 2, 1, mx.float32, False),
        ("kvarn", 96, 4, 2, mx.bfloat16, False),
        ("swapped", 64, 6, 2, mx.float32, False),
        ("symmetric", 40, 2, 8, mx.float32, True),
        ("mixed", 256, 2, 1, mx.float32, False),
        ("polar", 64, 4, 1, mx.float16, False),
        ("polar", 256, 2, 2, mx.float32, True),
        ("polar-int3", 128, 6, 3, mx.float32, False),
        ("polar-kvarn", 192, 2, 1, mx.float32, False),
    ],
)
def test_attend_is_softmax_over_what_is_stored(name, dims, heads, new, dtype, sinks):
    ours, plain = stores(name, dims)
    windows = [mx.array(data(1, 2, 21, dims, seed=2 + i)).astype(dtype) for i in range(2)]
    sink, live = tuple(x[:, :, :4] for x in windows), tuple(x[:, :, 4:] for x in windows)
    q = mx.array(data(1, heads, new, dims, seed=9)).astype(dtype)
    logits = mx.array(data(16, seed=6)[:heads]) if sinks else None
    view = View(live, sink, ours.read(0, 3))
    mask = "causal" if new > 1 else None
    assert attention.why_not(q, view, mask) is None
    out = attend(q, view, dims**-0.5, mask, logits)
    keys, values = attention._whole(View(live, sink, plain.read(0, 3)), mx.float32)
    spec = softmax(q, keys, values, dims**-0.5, 0, logits)
    assert rms(out, spec) < {mx.float32: 2e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize(("name", "change"), [("kivi", "scale"), ("kvarn", "outer")])
def test_each_number_is_read_where_it_belongs(name, change):
    """One number of the second page changed: what the kernels give changes there alone."""
    ours, plain = stores(name, 64)
    side, places = ("keys", 0) if name == "kivi" else ("values", 1)
    state = plain.state
    x = np.array(state[side][change])
    row = 2 if name == "kivi" else 1  # group 0 of page 1; page 1
    x[0, 1, row, 5] *= 3
    state[side] = {**state[side], change: mx.array(x)}
    other = Records(ours.config, (64, 64), make)
    other.restore(state, 3)
    before, after = (np.array(s.read(0, 3).decode(places, mx.float32)) for s in (ours, other))
    where = np.argwhere(before != after)
    first = 64 if name == "kivi" else ours.config.page
    last = 96 if name == "kivi" else 2 * ours.config.page
    assert len(where) > 10
    assert {tuple(n) for n in where[:, [0, 1, 3]]} == {(0, 1, 5)}
    assert where[:, 2].min() >= first
    assert where[:, 2].max() < last


@pytest.mark.parametrize("name", ("kivi-int2", "kvarn-k4v2", "polar"))
def test_a_cache_decodes_by_kernels_as_by_plain_ops(name):
    """Sealed on the way, trimmed into a page, saved and read by the other store."""
    config = parse_kv(name)
    keys, values, queries = (mx.array(data(1, h, 460, 64, seed=h)) for h in (2, 2, 4))
    ours, plain = CompressedKVCache(config), CompressedKVCache(config)
    done = 0
    for step in (420, 1, 30, 1, 8):
        part = slice(done, done + step)
        new, mask = (keys[:, :, part], values[:, :, part]), "causal" if step > 1 else None
        outs = []
        for cache, factory in ((ours, make), (plain, None)):
            with launch.using(factory):
                outs.append(
                    attend(queries[:, :, part], cache.update_and_fetch(*new)[0], 0.125, mask)
                )
        assert rms(*outs) < 5e-3  # a code on a rounding tie
        done += step
    assert type(ours._store) is Records
    assert type(plain._store) is Codes
    with launch.using(None):
        other = CompressedKVCache.from_state(ours.state)
        assert type(other._store) is Codes
    for cache in (ours, other):
        assert cache.trim(200) == 200
    whole = [attention._whole(c.keys_and_values()[0], mx.float32) for c in (ours, other)]
    for x, y in zip(*whole, strict=True):
        assert x.shape[2] == 260
        assert rms(x, y) < 1e-6


def test_what_headers_cannot_hold_says_why():
    spec = Affine(2, 24, axis="channel")
    assert records.why_not(spec, 64, 48) == "groups of 24 tokens are no multiple of 16"
    for given, why in {
        ("polar", 80, 128, True): "pairs of 80 dims",
        ("polar", 512, 128, True): "pairs of 512 dims",
        ("polar", 128, 96, True): "a page of 96 tokens is no multiple of 64",
        ("polar", 128, 128, False): "values as radius and angle",
    }.items():
        name, dims, page, keys_ = given
        assert why in records.why_not(PRESETS[name].keys.quantizer, dims, page, keys_)
    assert "radius int2 and angle int4" in records.why_not(Polar(2, 4), 64, 64)
