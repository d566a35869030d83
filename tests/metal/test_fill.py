"""Bits by direction in records: what is stored, and kernels beside plain ops and the law."""

import mlx.core as mx
import numpy as np
import pytest

from on_emulator import make, make_mma, make_tiles
from samples import data, rms, softmax

from mlxkv.cache import attention
from mlxkv.cache import stores as sealed
from mlxkv.cache.attention import attend
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import View
from mlxkv.codec import records
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.lowrank import DIMS, Fill
from mlxkv.formats.records import side_layout

PATTERNS = [  # all widths; an odd number of quarters; half a row behind whole ones; half a row alone
    (8, 4, 3, 2, 1),
    (8, 8, 4),
    (3, 3, 2, 1),
    (4, 3, 3, 2, 2, 1, 1),
    (2, 1),
    (3, 2),
    (2,),
    (1,),
    (1, 1, 1, 1, 1),
    (3, 3, 3),
]


PAGES, PAGE = 3, 32


def config_of(keys, values):
    """A cache of these widths, as a calibration leaves it."""
    sides = Side(Fill(2.0, keys), "fill-centred"), Side(Fill(2.0, values), "fill")
    return CacheConfig(*sides, page=PAGE)


def stores(config, dims, factory, tiled=False, heads=2, batch=1):
    """The same tokens in records that the kernel sealed and in plain codes."""
    turns = sample(heads, (dims, dims), config.fitted)
    pair = tuple(mx.array(data(batch, heads, PAGES * PAGE, dims, seed=i)) for i in range(2))
    both = (
        Records(config, (dims, dims), factory, tiled, turns),
        Codes(config, (dims, dims), turns),
    )
    for store in both:
        store.append(pair, PAGES)
    return both


def same(state, other) -> bool:
    return all(mx.array_equal(state[s][k], other[s][k]) for s in sealed.NAMES for k in other[s])


def ids(widths):
    return "".join(map(str, widths))


@pytest.mark.parametrize("keys", (True, False))
@pytest.mark.parametrize("widths", PATTERNS, ids=ids)
def test_records_hold_every_bit_and_take_the_bytes_that_are_counted(widths, keys):
    spec = Fill(2.0, widths)
    at = side_layout(spec, spec.dims, 16, keys)
    assert 32 * at.words == 16 * spec.dims * spec.bits_per_value(spec.dims, 16)
    rng = np.random.default_rng(0)
    top = 2 ** np.repeat(widths, DIMS)
    codes = rng.integers(0, top, (2, 1, 48, spec.dims))
    scale = mx.array(rng.standard_normal((2, 1, 48, 1)).astype(np.float16))
    words = records.pack(mx.array(codes), {"scale": scale}, at)
    assert words.shape == (2, 1, 3, at.words)
    back, numbers = records.unpack(words, at)
    np.testing.assert_array_equal(np.array(back), codes)
    assert mx.array_equal(numbers["scale"], scale)


BOTH = [  # head dim, widths of keys and of values
    (64, (4, 2, 1), (3, 2, 2, 1)),
    (64, (3, 3, 2), (2,)),
    (80, (8, 3, 1, 1), (1, 1, 1)),
    (128, (8, 4, 3, 3, 2, 2, 1), (4, 3, 2, 2, 2, 1, 1, 1)),
]


@pytest.mark.parametrize(("dims", "keys", "values"), BOTH)
def test_the_seal_kernel_writes_what_plain_ops_store(dims, keys, values):
    """And each store reads what the other saved; unseal gives the same numbers."""
    config = config_of(keys, values)
    ours, plain = stores(config, dims, make)
    back, other = stores(config, dims, make)[1], stores(config, dims, make)[0]
    assert same(sealed.codes_of(ours), plain.state)
    other.restore(plain.state, PAGES)
    back.restore(ours.state, PAGES)
    assert mx.array_equal(ours.state["records"], other.state["records"])
    assert same(back.state, plain.state)
    for side, at in enumerate((ours.layout.keys, ours.layout.values)):
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            got = ours.read(0, PAGES)._unsealed(side, dtype)
            want = plain.codecs[side].decode_stored(plain.state[sealed.NAMES[side]], dtype)
            assert got.shape == (1, 2, PAGES * PAGE, at.dims) and mx.array_equal(got, want)


def test_zeros_and_huge_numbers_are_sealed_as_plain_ops_do():
    config = config_of((4, 2), (3, 1))
    turns = sample(1, (64, 64), config.fitted)
    x = data(1, 1, PAGE, 64)
    x[0, 0, 3], x[0, 0, 7], x[0, 0, 9] = 0, x[0, 0, 7] * 1e6, x[0, 0, 9] * 1e-7
    made = (
        Records(config, (64, 64), make, False, turns),
        Codes(config, (64, 64), turns),
    )
    for store in made:
        store.append((mx.array(x), mx.array(x)), 1)
    assert same(sealed.codes_of(made[0]), made[1].state)


ATTENDED = [  # head dim, keys, values, heads, kv heads, new tokens
    (64, (4, 2, 1), (3, 2, 2, 1), 2, 2, 1),
    (64, (3, 3, 2), (2,), 8, 1, 3),
    (80, (8, 3, 1, 1), (1, 1, 1), 4, 2, 2),
    (128, (8, 4, 3, 3, 2, 2, 1), (4, 3, 2, 2, 2, 1, 1, 1), 8, 2, 1),
    (256, (4, 3, 2, 2, 2, 1, 1, 1, 1, 1), (3, 2, 2, 2, 1, 1), 2, 1, 1),
    (64, (2, 2, 2, 2), (2, 2, 2, 2), 4, 2, 1),
]
FACTORIES = [
    (make, mx.float32, 5e-6),
    (make_tiles, mx.float16, 3e-3),
    (make_tiles, mx.bfloat16, 6e-3),
    (make_mma, mx.bfloat16, 6e-3),
]


@pytest.mark.parametrize(("factory", "dtype", "bound"), FACTORIES)
@pytest.mark.parametrize(("dims", "keys", "values", "heads", "kv_heads", "new"), ATTENDED)
def test_attention_is_softmax_over_what_is_stored(
    dims, keys, values, heads, kv_heads, new, factory, dtype, bound
):
    tiled = factory is not make
    config = config_of(keys, values)
    ours, plain = stores(config, dims, factory, tiled, kv_heads)
    windows = [mx.array(data(1, kv_heads, 21, dims, seed=2 + i)).astype(dtype) for i in range(2)]
    sink, live = tuple(x[:, :, :4] for x in windows), tuple(x[:, :, 4:] for x in windows)
    q = mx.array(data(1, heads, new, dims, seed=9)).astype(dtype)
    mask = None if new == 1 else "causal"
    out = attend(q, View(live, sink, ours.read(0, PAGES)), dims**-0.5, mask)
    k, v = attention._whole(View(live, sink, plain.read(0, PAGES)), mx.float32)
    assert rms(out, softmax(q, k, v, dims**-0.5, 0, None)) < bound
