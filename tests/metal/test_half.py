"""Records of float16 numbers: low rank that is not quantised, sealed and read by kernels."""

from dataclasses import replace

import mlx.core as mx
import pytest
from on_emulator import make, make_mma, make_tiles
from samples import data, rms, softmax

from mlxkv.cache import attention, choose
from mlxkv.cache import stores as sealed
from mlxkv.cache.attention import attend
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import OPS, View
from mlxkv.codec.maps import sample
from mlxkv.formats.names import parse_kv
from mlxkv.metal import launch, tiles

pytestmark = pytest.mark.usefixtures("trusted")

PAGES, PAGE = 3, 32
NAMES = ("keys", "values")


def empty(name: str, dims: int, factory, tiled: bool = False):
    """Records, and what plain ops read."""
    config = replace(parse_kv(name), page=PAGE)
    turns = sample(2, (dims, dims), config.fitted)
    return Records(config, (dims, dims), factory, tiled, turns), Codes(config, (dims, dims), turns)


def stores(name: str, dims: int, factory, tiled: bool = False, big: float = 1.0):
    """The same tokens in both, the records sealed by the kernel."""
    pair = tuple(mx.array(big * data(1, 2, PAGES * PAGE, dims, seed=i)) for i in range(2))
    made = empty(name, dims, factory, tiled)
    for store in made:
        store.append(pair, PAGES)
    return made


def same(state, other) -> bool:
    return all(mx.array_equal(state[s][k], other[s][k]) for s in NAMES for k in other[s])


def test_the_seal_kernel_writes_what_plain_ops_store(subtests):
    """And each store reads what the other saved."""
    for name, dims in [("static-r102", 128), ("static-r24+int8/static-r24", 40)]:
        with subtests.test(name=name, dims=dims):
            ours, plain = stores(name, dims, make)
            other, back = empty(name, dims, make)
            other.restore(plain.state, PAGES)
            back.restore(ours.state, PAGES)
            assert mx.array_equal(ours.state["records"], other.state["records"])
            assert same(back.state, plain.state)


def test_a_square_basis_is_a_product_inside_the_kernel():
    ours, plain = stores("static-1.0", 64, make)
    for i in (0, 1):
        assert rms(*(x.read(0, PAGES).decode(i, mx.float32) for x in (ours, plain))) < 1e-4


def test_numbers_beyond_float16_saturate():
    ours, plain = stores("static-r24", 40, make, big=1e5)
    assert same(sealed.codes_of(ours), plain.state)
    assert mx.abs(plain.state["keys"]["values"]).max() == 65504


def test_attention_is_softmax_over_what_is_stored(subtests):
    for name, dims, factory, dtype, bound in [
        ("static-0.75", 64, make, mx.float32, 5e-6),
        ("static-r102", 128, make_mma, mx.float16, 3e-3),
        ("static-r24+kivi-int4/static-r24", 40, make_tiles, mx.bfloat16, 6e-3),
    ]:
        with subtests.test(name=name, dims=dims, factory=factory):
            tiled = factory is not make
            ours, plain = stores(name, dims, factory, tiled)
            assert not tiled or tiles.why_not(ours.layout, dims, dtype, factory) is None
            windows = [mx.array(data(1, 2, 21, dims, seed=2 + i)).astype(dtype) for i in range(2)]
            sink, live = tuple(x[:, :, :4] for x in windows), tuple(x[:, :, 4:] for x in windows)
            q = mx.array(data(1, 4, 2, dims, seed=9)).astype(dtype)
            view = View(live, sink, ours.read(0, PAGES))
            assert view.pages.plan.body != OPS
            out = attend(q, view, dims**-0.5, "causal")
            keys, values = attention._whole(View(live, sink, plain.read(0, PAGES)), mx.float32)
            assert rms(out, softmax(q, keys, values, dims**-0.5)) < bound


def test_only_low_rank_is_kept_in_such_records():
    with launch.using(make):
        full = parse_kv("fp16/int4")
        assert "full-precision" in choose.plan(full, (64, 64), mx.float32).reason
        assert choose.plan(parse_kv("static-r24"), (40, 40), mx.float32).body != OPS
        reason = choose.plan(parse_kv("oja-0.8"), (128, 128), mx.float32).reason
        assert reason == "102 float16 dims would take the room of 128 in records"
