"""Every method in the kernels: records, dequantizing, both bodies of decode attention, their own test."""

import mlx.core as mx
import numpy as np
from methods import METHODS, READ, Method, names
from on_emulator import make, make_mma, make_tiles
from samples import data, rms, softmax

from mlxkv.cache import attention
from mlxkv.cache.attention import attend
from mlxkv.cache.backends import PortableBackend, TileBackend
from mlxkv.cache.stores import Codes, Records
from mlxkv.cache.view import View
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Affine, Polar, PolarTree
from mlxkv.formats.records import record_layout
from mlxkv.metal import attend as attend_kernels
from mlxkv.metal import tiles


def stores(method, dims, factory, tiled=False, pages=3, quantized=False):
    """(pages as records, the same as codes). quantized: by the kernel that the store has for it, if any."""
    config = method.config(dims)
    pair = tuple(mx.array(data(1, 2, pages * config.page, dims, seed=i)) for i in range(2))
    backend = (TileBackend if tiled else PortableBackend)(factory)
    ours, plain = Records(config, (dims, dims), backend), Codes(config, (dims, dims))
    plain.append(pair, pages)
    if quantized:
        ours.append(pair, 1)
        ours.append(pair, pages - 1, config.page)
    else:
        ours.restore(plain.state, pages)
    return ours, plain


def run(method, dims, heads, new, dtype, factory, tiled=False, pages=3):
    """The error of attention over two windows and pages, by kernels."""
    ours, plain = stores(method, dims, factory, tiled, pages)
    windows = [mx.array(data(1, 2, 21, dims, seed=2 + i)).astype(dtype) for i in range(2)]
    sink, recent = tuple(x[:, :, :4] for x in windows), tuple(x[:, :, 4:] for x in windows)
    q = mx.array(data(1, heads, new, dims, seed=9)).astype(dtype)
    logits = mx.array(data(16, seed=6)[:heads])
    mask = "causal" if new > 1 else None
    view = View(recent, sink, ours.read(0, pages))
    assert view.pages.backend.kernel_builder is not None
    out = attend(q, view, dims**-0.5, mask, logits)
    keys, values = attention.decode_all(View(recent, sink, plain.read(0, pages)), mx.float32)
    return rms(out, softmax(q, keys, values, dims**-0.5, logits))


def test_which_methods_have_kernels(subtests):
    """What the table says, the code says; and one line says why not."""
    for name in METHODS:
        with subtests.test(name=name):
            method = METHODS[name]
            config, dims = method.config(method.dims), method.dims
            sides = zip((config.keys, config.values), (True, False), strict=True)
            why = [side.quantizer.why_no_record(dims, config.page, keys) for side, keys in sides]
            assert (not any(why)) == method.kernels, why
            if method.kernels:
                found = record_layout(config, dims, dims)
                why = tiles.why_not(found, dims, mx.float16, make_tiles)
                assert (why is None) == method.tiles, why


def test_tiles_are_softmax_over_what_is_stored(subtests):
    """By the tiles of CUDA and of Metal in turn: more rows than a tile has and dims that are no whole
    blocks, one row and one block."""
    for name in names(tiles=True):
        with subtests.test(name=name):
            method = METHODS[name]
            if names(tiles=True).index(name) % 2:
                assert run(method, method.dims, 6, 4, mx.float16, make_mma, tiled=True) < 3e-3
            else:
                assert run(method, 64, 2, 1, mx.float16, make_tiles, tiled=True) < 3e-3


def test_tiles_of_wide_heads(subtests):
    """Queries in threadgroup memory, and words as blocks need them: both blocks of a pair, also of 192 dims."""
    for name, dims in (("polar", 192), ("polar-tree", 256)):
        with subtests.test(name=name, dims=dims):
            assert run(METHODS[name], dims, 2, 1, mx.float16, make_tiles, tiled=True) < 3e-3


def test_portable_attention_is_softmax_over_what_is_stored(subtests):
    for name in READ:
        with subtests.test(name=name):
            method = METHODS[name]
            assert run(method, method.dims, 6, 3, mx.float32, make) < 4e-6


def test_portable_attention_of_other_shapes(subtests):
    for name, dims, heads, new, dtype in [
        ("channels of both", 40, 2, 8, mx.float32),
        ("polar", 192, 2, 1, mx.float32),
    ]:
        with subtests.test(name=name, dims=dims, heads=heads):
            assert run(METHODS[name], dims, heads, new, dtype, make) < 2e-6


def test_simdgroups_that_share_tokens_make_probabilities_of_their_own_rows(subtests):
    """Teams of two and four, whose scores have parts that their tokens share: biases of channels."""
    for dims, dtype, bound in ((128, mx.float32, 4e-6), (256, mx.float16, 3e-3)):
        with subtests.test(dims=dims):
            layout = record_layout(METHODS["kivi"].config(dims), dims, dims)
            assert attend_kernels.tile_of(layout, dims, 4)[:2] == (4, dims // 64)
            assert run(METHODS["kivi"], dims, 8, 1, dtype, make) < bound


def test_records_hold_the_same_as_codes_and_dequantize_reads_them(subtests):
    """Without a transform to the bit: behind one, a kernel's sum may end on the other side of a tie."""
    for name in READ:
        with subtests.test(name=name):
            method, sides = METHODS[name], ("keys", "values")
            dims = method.dims
            exact = method.transform == "none"
            ours, plain = stores(method, dims, make, quantized=exact)
            back, again = (
                Codes(ours.config, (dims, dims)),
                Records(ours.config, (dims, dims), PortableBackend(make)),
            )
            back.restore(ours.state, 3)
            again.restore(plain.state, 3)
            for side in sides:
                for key, x in plain.state[side].items():
                    assert mx.array_equal(back.state[side][key], x), (side, key)
            for part, x in ours.state.items():
                assert mx.array_equal(again.state[part], x), part
            recent = mx.array(data(1, 2, 5, dims, seed=7))
            for side in (0, 1):
                for start, stop in ((0, 3), (1, 2)):  # a cut of the buffer has headers of its own
                    read = [s.read(start, stop) for s in (ours, plain)]
                    found, right = (pages.between(None, (recent, recent))[side] for pages in read)
                    assert found.shape == right.shape and rms(found, right) < 3e-6
                    found, right = (pages.decode(side, mx.float32) for pages in read)
                    assert rms(found, right) < 3e-6


def test_scales_of_channels_change_inside_the_run_of_a_simdgroup(subtests, monkeypatch):
    """Runs of 6 records, pages of 4: some simdgroups begin and end inside a page. At 256 dims scaled queries lie in
    threadgroup memory."""
    for bits, dims, factory in ((2, 40, make_mma), (4, 256, make_tiles)):
        with subtests.test(bits=bits, dims=dims):
            method = Method(Affine(bits, 64, axis="channel"), Affine(bits, 32))
            monkeypatch.setattr(tiles, "splits_for", lambda *args: (1, 1))
            assert run(method, dims, 2, 1, mx.float16, factory, tiled=True, pages=9) < 3e-3


def test_what_tiles_do_not_read_says_why():
    def why(keys, values, dims=64):
        config = CacheConfig(Side(keys), Side(values), page=64)
        layout = record_layout(config, dims, dims)
        return tiles.why_not(layout, dims, mx.float16, make_tiles)

    channel = Affine(4, 32, axis="channel")
    assert why(channel, Affine(4)) is None
    assert "scales per channel of values" in why(Affine(4), channel)
    assert why(PolarTree(), PolarTree(), 256) is None


# -- headers of pages, for scales per channel


def test_nothing_is_stored_twice(trusted):
    """At whole blocks of dims records and headers take what the codes of plain ops take."""
    for name in ("kivi", "channels of both", "polar"):
        ours, plain = stores(METHODS[name], 128, make, quantized=True)
        assert sum(x.nbytes for x in ours.arrays()) == sum(x.nbytes for x in plain.arrays()), name


def test_each_number_is_read_where_it_belongs(trusted):
    """One scale of the second page changed: what the kernels give changes there alone."""
    ours, plain = stores(METHODS["kivi"], 64, make, quantized=True)
    scale = np.array(plain.state["keys"]["scale"])
    scale[0, 1, 2, 5] *= 3  # group 0 of page 1
    state = plain.state | {"keys": {**plain.state["keys"], "scale": mx.array(scale)}}
    other = Records(ours.config, (64, 64), PortableBackend(make))
    other.restore(state, 3)
    before, after = (np.array(s.read(0, 3).decode(0, mx.float32)) for s in (ours, other))
    where = np.argwhere(before != after)
    assert len(where) > 10
    assert {tuple(n) for n in where[:, [0, 1, 3]]} == {(0, 1, 5)}
    assert where[:, 2].min() >= 64 and where[:, 2].max() < 96


def test_what_headers_cannot_hold_says_why():
    spec = Affine(2, 24, axis="channel")
    assert spec.why_no_record(64, 48) == "groups of 24 tokens are no multiple of 16"
    for given, why in {
        ("polar", 80, 128, True): "pairs of 80 dims",
        ("polar", 512, 128, True): "pairs of 512 dims",
        ("polar", 128, 96, True): "a page of 96 tokens is no multiple of 64",
        ("polar", 128, 128, False): "values as radius and angle",
    }.items():
        name, dims, page, keys_ = given
        assert why in PRESETS[name].keys.quantizer.why_no_record(dims, page, keys_)
    assert "radius int2 and angle int4" in Polar(2, 4).why_no_record(64, 64)
