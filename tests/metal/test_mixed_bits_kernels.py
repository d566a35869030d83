"""What calibrated maps lead to, mixed bits and float16 numbers of low rank, in records and kernels, beside plain
ops."""

from dataclasses import replace

import mlx.core as mx
from methods import config_named
from on_emulator import make, make_mma, make_tiles
from samples import data, rms, softmax

from mlxkv.cache import attention, choose, selftest
from mlxkv.cache import stores as quantized
from mlxkv.cache.attention import attend
from mlxkv.cache.backends import PortableBackend, TileBackend
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import View
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import DIMS, Affine, MixedBits
from mlxkv.formats.records import record_layout
from mlxkv.metal import launch, tiles
from mlxkv.metal.template import mixed_bits_table

PAGES, PAGE = 3, 32


def config_of(keys, values):
    """A cache of these widths, as a calibration leaves it."""
    sides = Side(MixedBits(2.0, keys), "fill-centred"), Side(MixedBits(2.0, values), "fill")
    return CacheConfig(*sides, page=PAGE)


def low(name):
    """A cache of low rank, most of it in float16."""
    return replace(config_named(name), page=PAGE)


def stores(config, dims, factory, heads=2, tokens=None, backend=PortableBackend):
    """The same tokens in records that the kernel quantized and in plain codes."""
    layer_maps = sample(heads, (dims, dims), config.fitted)
    if tokens is None:
        tokens = [data(1, heads, PAGES * PAGE, dims, seed=i) for i in range(2)]
    both = (
        Records(config, (dims, dims), backend(factory), layer_maps),
        Codes(config, (dims, dims), layer_maps),
    )
    for store in both:
        store.append(tuple(map(mx.array, tokens)), tokens[0].shape[2] // PAGE)
    return both


def same(state, other) -> bool:
    return all(mx.array_equal(state[s][k], other[s][k]) for s in quantized.NAMES for k in other[s])


QUANTIZED = [
    (64, config_of((3, 3, 2), (2,))),
    (128, config_of((8, 4, 3, 3, 2, 2, 1), (4, 3, 2, 2, 2, 1, 1, 1))),
    (128, low("static-r102")),
    (40, low("static-r24+int8/static-r24")),
]


def test_the_quantize_kernel_writes_what_plain_ops_store(subtests):
    """And each store reads what the other saved; dequantize gives the same numbers."""
    for dims, config in QUANTIZED:
        with subtests.test(dims=dims, keys=config.keys.label):
            ours, plain = stores(config, dims, make)
            other, back = stores(config, dims, make)
            assert same(quantized.codes_of(ours), plain.state)
            other.restore(plain.state, PAGES)
            back.restore(ours.state, PAGES)
            assert mx.array_equal(ours.state["records"], other.state["records"])
            assert same(back.state, plain.state)
            for side, at in enumerate((ours.layout.keys, ours.layout.values)):
                for dtype in (mx.float32, mx.float16, mx.bfloat16) if config.mixed_bits else ():
                    got = ours.read(0, PAGES)._dequantized(side, dtype)
                    want = plain.codecs[side].decode_stored(
                        plain.state[quantized.NAMES[side]], dtype
                    )
                    assert got.shape == (1, 2, PAGES * PAGE, at.dims) and mx.array_equal(got, want)


def test_zeros_and_huge_numbers_are_quantized_as_plain_ops_do():
    x = data(1, 1, PAGE, 64)
    x[0, 0, 3], x[0, 0, 7], x[0, 0, 9] = 0, x[0, 0, 7] * 1e6, x[0, 0, 9] * 1e-7
    for config in (config_of((4, 2), (3, 1)), low("static-r24")):
        ours, plain = stores(config, 64, make, heads=1, tokens=(x, x))
        assert same(quantized.codes_of(ours), plain.state)
    assert mx.abs(plain.state["keys"]["values"]).max() == 65504


def test_a_square_basis_is_a_product_inside_the_kernel():
    ours, plain = stores(low("static-1.0"), 64, make)
    for i in (0, 1):
        assert rms(*(x.read(0, PAGES).decode(i, mx.float32) for x in (ours, plain))) < 1e-4


WIDE = config_of((8, 4, 3, 2, 1), (4, 3, 2, 1, 1))
# Head dim, cache, heads, kv heads, new tokens, factory, dtype, bound of the error. 512: Gemma 4.
ATTENDED = [
    (80, config_of((8, 3, 1, 1), (1, 1, 1)), 4, 2, 2, make_tiles, mx.bfloat16, 6e-3),
    (128, QUANTIZED[1][1], 8, 2, 1, make_mma, mx.bfloat16, 6e-3),
    (128, QUANTIZED[1][1], 8, 2, 1, make, mx.float16, 2e-3),
    (512, WIDE, 4, 2, 1, make, mx.float32, 5e-6),
    (64, low("static-0.75"), 4, 2, 2, make, mx.float32, 5e-6),
    (40, low("static-r24+kivi-int4/static-r24"), 4, 2, 2, make_tiles, mx.bfloat16, 6e-3),
]


def test_attention_is_softmax_over_what_is_stored(subtests):
    """Of widths at 64 dims: `test_method_kernels.py`."""
    for dims, config, heads, kv_heads, new, factory, dtype, bound in ATTENDED:
        with subtests.test(dims=dims, keys=config.keys.label):
            backend = PortableBackend if factory is make else TileBackend
            ours, plain = stores(config, dims, factory, kv_heads, backend=backend)
            shape = 1, kv_heads, 21, dims
            windows = [mx.array(data(*shape, seed=2 + i)).astype(dtype) for i in range(2)]
            sink, recent = tuple(x[:, :, :4] for x in windows), tuple(x[:, :, 4:] for x in windows)
            q = mx.array(data(1, heads, new, dims, seed=9)).astype(dtype)
            view = View(recent, sink, ours.read(0, PAGES))
            out = attend(q, view, dims**-0.5, None if new == 1 else "causal")
            keys, values = attention.decode_all(
                View(recent, sink, plain.read(0, PAGES)), mx.float32
            )
            assert rms(out, softmax(q, keys, values, dims**-0.5)) < bound


def test_scores_that_grow_along_the_records():
    """The running maximum is raised again, and what was summed before shrinks."""
    ramp = mx.linspace(0.1, 4, 12 * PAGE)[:, None]
    keys, values = (mx.array(data(1, 1, 12 * PAGE, 64, seed=i)) for i in range(2))
    ours, plain = stores(config_of((4,), (2, 2, 1)), 64, make, 1, (keys * ramp, values))
    recent = tuple(mx.array(data(1, 1, 5, 64, seed=2 + i)).astype(mx.float16) for i in range(2))
    q = mx.array(data(1, 4, 1, 64, seed=9)).astype(mx.float16)
    out = attend(q, View(recent, None, ours.read(0, 12)), 1.0)
    right = attention.decode_all(View(recent, None, plain.read(0, 12)), mx.float32)
    assert rms(out, softmax(q, *right, 1.0)) < 2e-3


# -- which kernels


def test_one_text_and_one_trial_serve_all_widths():
    made = set()

    def listening(name, **texts):
        made.add(name)
        return make_tiles(name, **texts)

    listening.tiles = True
    for keys, values in (((4, 2, 1), (3, 2, 2, 1)), ((2,), (8, 1)), ((3, 3, 3, 1), (1, 1))):
        config = config_of(keys, values)
        ours, _ = stores(config, 64, listening, backend=TileBackend)
        window = (mx.zeros((1, 2, 1, 64), mx.float16),) * 2
        mx.eval(
            attend(
                mx.zeros((1, 4, 1, 64), mx.float16), View(window, None, ours.read(0, PAGES)), 1.0
            )
        )
        mx.eval(ours.read(0, PAGES).decode(0, mx.float16))
        other = selftest.representative_config(config, 64)
        assert other == selftest.representative_config(config_of((1,), (1,)), 64)
    assert sorted(name.rsplit("_", 1)[0] for name in made) == [
        "mlxkv_attend_tile",
        "mlxkv_dequantize",
        "mlxkv_quantize",
    ]


def test_the_trial_of_any_head_is_of_records_that_kernels_read(subtests):
    """Heads of 512 dims (Gemma 4) have more blocks than a table: directions behind them are not stored."""
    for dims in (16, 48, 256, 272, 512):
        with subtests.test(dims=dims):
            tried = selftest.representative_config(config_of((2,), (1,)), dims)
            sides = zip((tried.keys, tried.values), (True, False), strict=True)
            assert not any(
                side.quantizer.why_no_record(side.dims(dims), PAGE, keys) for side, keys in sides
            )
            mixed_bits_table(record_layout(tried, *tried.dims(dims, dims)))


def test_a_ring_has_room_for_the_longest_records():
    """On CUDA, where one text serves records of all sizes."""
    factory = mx.fast.cuda_kernel
    for dims, busy in ((64, 1), (128, 1), (128, 64), (256, 1)):
        config = config_of((8,) * (dims // DIMS), (8,) * (dims // DIMS))
        small = config_of((1,), (1,))
        layout, other = (record_layout(x, *x.dims(dims, dims)) for x in (config, small))
        wide = tiles._is_wide(layout, dims)
        assert wide == tiles._is_wide(other, dims) == (dims > 128)
        simdgroups = tiles._simdgroups(layout, wide, busy, factory)
        assert simdgroups == tiles._simdgroups(other, wide, busy, factory)
        stages, size = ring = tiles._ring(layout, simdgroups, wide, factory)
        assert ring == tiles._ring(other, simdgroups, wide, factory)
        words = tiles._record_words(layout, simdgroups, *ring)
        barriers = -(-stages * simdgroups * 8 // 128) * 128
        assert simdgroups * stages * words * 8 + barriers <= size <= (227 - 40) << 10
        assert stages * words >= layout.words


def test_plans_say_what_has_no_kernel():
    with launch.using(make_tiles):
        plan = choose.plan(config_of((2, 1), (2, 1)), (64, 64), mx.float16)
        assert plan.by_kernels
        reason = choose.plan(config_named("fill-2.25"), (64, 64), mx.float16).reason
        assert reason == "a calibration has to give mixed bits their widths"
        beside = CacheConfig(Side(MixedBits(2.0, (2, 2, 2, 2))), Side(Affine(4)))
        reason = choose.plan(beside, (64, 64), mx.float16).reason
        assert reason == "mixed bits beside other codes have no kernel"


def test_only_low_rank_is_kept_as_numbers(trusted):
    with launch.using(make):
        full = config_named("fp16/int4")
        assert "full-precision" in choose.plan(full, (64, 64), mx.float32).reason
        assert choose.plan(config_named("static-r24"), (40, 40), mx.float32).by_kernels
        reason = choose.plan(config_named("oja-0.8"), (128, 128), mx.float32).reason
        assert reason == "102 float16 dims would take the room of 128 in records"


def test_kernels_pass_the_test_of_users_machines():
    """With logits of attention sinks and capped scores."""
    case = selftest.AttentionShape(8, 2, sinks=True, softcap=20.0)
    found = selftest.test(config_of((2,), (3, 1)), 64, mx.bfloat16, TileBackend(make_mma), case)
    assert found.reason is None and found.errors["attend"] < 6e-3 and not found.ties
