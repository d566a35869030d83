"""Keys with a scale per channel, quantized by a kernel in the emulator, against plain ops."""

import mlx.core as mx
from on_emulator import make
from samples import data

from mlxkv.cache.backends import PortableBackend
from mlxkv.cache.stores import Codes, Records
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine, Codebook, Polar
from mlxkv.formats.records import record_layout
from mlxkv.metal import quantize

# keys, values, page, dims, transform of the values, dtype
CASES = {
    "int2": (Affine(2, 128, axis="channel"), Affine(2, 128, clip=0.94), 128, 64, "random"),
    "kivi": (Affine(4, 32, axis="channel"), Affine(4, 32), 64, 80, "none"),
    "odd": (Affine(3, 48, True, axis="channel"), Affine(3, 64, True), 48, 46, "none"),
    "int8": (Affine(8, 16, axis="channel"), Affine(8, 0, clip=0.5), 32, 256, "none"),
}


def stores(name, factory=make):
    keys, values, page, dims, transform = CASES[name]
    config = CacheConfig(Side(keys, "none"), Side(values, transform), page=page)
    return (
        Records(config, (dims, dims), PortableBackend(factory)),
        Codes(config, (dims, dims)),
        dims,
        page,
    )


def pair(page, dims, count, dtype=mx.float32):
    """Channels of all sizes, one that is constant, one of zeros; room before the pages."""
    x = data(2, 2, (count + 1) * page, dims, seed=3) * (1 + 50 * (mx.arange(dims) % 7 == 3))
    x = mx.where(mx.arange(dims) == 5, 3.25, mx.where(mx.arange(dims) == 6, 0.0, x))
    return x.astype(dtype), mx.array(data(2, 2, (count + 1) * page, dims, seed=4)).astype(dtype)


def test_pages_are_those_of_plain_ops(subtests):
    for dtype in (mx.float32, mx.bfloat16):
        for name in CASES:
            with subtests.test(dtype=dtype, name=name):
                ours, plain, dims, page = stores(name)
                assert quantize.why_no_channels(ours.layout) is None
                x = pair(page, dims, 2, dtype)
                for store in (ours, plain):
                    store.append(x, 2, page)
                ours_state, same = (
                    ours.state,
                    Records(ours.config, (dims, dims), PortableBackend(make)),
                )
                same.restore(plain.state, 2)
                assert mx.array_equal(ours_state["headers"], same.state["headers"])
                assert mx.array_equal(ours_state["records"], same.state["records"])


def test_the_kernel_is_one_dispatch():
    built = []

    def counted(name, *rest, **more):
        built.append(name)
        return make(name, *rest, **more)

    ours, _, dims, page = stores("kivi", counted)
    ours.append(pair(page, dims, 1), 1)
    assert len(built) == 1 and "quantize_channel" in built[0]


def test_what_it_does_not_quantize_says_why():
    def why(keys, values, dims=64):
        config = CacheConfig(Side(keys), Side(values), page=64)
        return quantize.why_no_channels(record_layout(config, dims, dims))

    channel = Affine(4, 32, axis="channel")
    assert why(channel, Affine(2, 32)) is None
    assert "without scales per channel" in why(Affine(4), Affine(4))
    assert "without scales per channel" in why(Polar(4, 4), Affine(4))
    assert "values that are not" in why(channel, channel)
    assert "values that are not" in why(channel, Codebook(4))
    assert "512 channels" in why(channel, Affine(4), 512)
