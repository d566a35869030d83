"""Every kernel in the emulator, with all its checks, against the plain ops and the spec."""

import dataclasses
from itertools import islice

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import make, make_tiles
from random_models import random_model
from samples import data, rms, softmax
from small_caches import SMALL, TIES, layout, walk

from mlxkv.cache import attention, choose, selftest
from mlxkv.cache.attention import attend
from mlxkv.cache.backends import TileBackend
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.stores import Codes, Records
from mlxkv.codec import affine, records
from mlxkv.doctor.golden import TABLE as golden
from mlxkv.formats.config import Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import DIMS, Affine, Half, MixedBits, Polar
from mlxkv.formats.records import RecordLayout
from mlxkv.loading.attach import attach, detach
from mlxkv.metal import attend as kernels
from mlxkv.metal import launch, quantize, tiles


def test_records_hold_the_codes_and_come_back(subtests):
    """In the bytes that are counted. Mixed bits: all widths; an odd number of quarters; half a row behind whole
    ones; half a row alone."""
    for spec, dims, keys in [
        (Affine(2, 32, True), 64, True),
        (Affine(3, 64), 80, False),
        (Affine(4, 64), 96, True),
        (Affine(8, 64), 128, False),
        (Affine(3, 0), 192, True),
        (Affine(2, 64), 512, False),
        (Affine(8, 0, True), 40, True),
        *((MixedBits(2.0, widths), 0, True) for widths in [(8, 4, 3, 2, 1), (8, 8, 4), (1,)]),
        *((MixedBits(2.0, widths), 0, False) for widths in [(4, 3, 3, 2, 2, 1, 1), (3, 3, 3)]),
        (Half(), 24, True),
        (Half(), 102, False),
    ]:
        with subtests.test(spec=spec, dims=dims):
            widths = np.repeat(spec.widths, DIMS) if isinstance(spec, MixedBits) else None
            dims = dims if widths is None else spec.dims
            at, rng = spec.layout(dims, 64, keys), np.random.default_rng(0)
            if widths is not None:
                assert 32 * at.words == 16 * dims * spec.bits_per_value(dims, 16)
            codes = rng.integers(0, 2 ** (at.bits if widths is None else widths), (1, 2, 48, dims))
            numbers = {
                name: mx.array(rng.standard_normal((1, 2, 48, at.groups)).astype(np.float16))
                for name in at.numbers
            }
            words = records.pack(mx.array(codes), numbers, at)
            assert words.shape == (1, 2, 3, at.words)
            back, same = records.unpack(words, at)
            np.testing.assert_array_equal(np.array(back), codes)
            assert set(same) == set(numbers)
            assert all(mx.array_equal(same[name], x) for name, x in numbers.items())


def test_dequantize_is_its_twin(subtests):
    for dims, keys in ((64, True), (80, False)):
        with subtests.test(dims=dims, keys=keys):
            specs = Affine(3, 64), Affine(8, 32, True)
            whole = RecordLayout(
                *(
                    spec.layout(dims, 64, side)
                    for spec, side in zip(specs, (True, False), strict=True)
                )
            )
            pair = [mx.array(data(1, 2, 48, dims, seed=i)) for i in range(2)]
            run = kernels.Run(quantize.quantize_pages(pair, whole, make), 2, whole)
            decoded = kernels.dequantize_side(run, keys, mx.float32, make)
            spec = specs[0 if keys else 1]
            stored = affine.encode(spec, pair[0 if keys else 1], 16)
            plain = affine.decode(spec, stored, dims, 16, mx.float32)[:, :, :32]
            assert rms(decoded, plain) < 3e-6


def test_the_golden_table_holds_with_kernels(trusted):
    with launch.using(make):
        rows = list(islice(golden.attention_rows(), 4))
    assert rows and not [row for row in rows if not row.ok]


def same_but_ties(x, spec):
    """At most 1 % of the tokens differ, and by what a few of their codes may be off."""
    off = np.abs(np.array(x) - np.array(spec)).max(-1)
    assert (off > 1e-4).mean() < 0.01
    assert rms(x, spec) < 2e-2


def test_a_cache_of_records_gives_what_a_cache_of_codes_gives(trusted):
    ours, plain = walk(make, mx.float32, TIES)
    assert type(ours.store) is Records
    assert type(plain.store) is Codes
    assert ours.nbytes <= plain.nbytes * 1.02
    # cut back to a page, with what is left the same
    for cache in (ours, plain):
        cache.trim_to(cache.offset - 120)
    a, b = (attention.decode_all(c.keys_and_values()[0], mx.float32) for c in (ours, plain))
    same_but_ties(a[0], b[0])
    same_but_ties(a[1], b[1])


def test_each_store_reads_what_the_other_saved(subtests, trusted):
    for start in (make, None):
        with subtests.test(start=start):
            keys, values = mx.array(data(1, 2, 200, 64)), mx.array(data(1, 2, 200, 64, seed=1))
            cache = CompressedKVCache(SMALL)
            with launch.using(start):
                cache.update_and_fetch(keys, values)
                before = attention.decode_all(cache.keys_and_values()[0], mx.float32)
            with launch.using(None if start else make):
                other = CompressedKVCache.from_state(cache.state)
                assert type(other.store) is not type(cache.store)
                after = attention.decode_all(other.keys_and_values()[0], mx.float32)
            for x, y in zip(before, after, strict=True):
                assert rms(x, y) < 2e-6
            back = CompressedKVCache.from_state(
                other.state
            )  # and what was saved is kept to the bit
            with launch.using(start):
                again = CompressedKVCache.from_state(back.state)
            for x, y in zip(cache.store.arrays(), again.store.arrays(), strict=True):
                assert mx.array_equal(x[:, :, : y.shape[2]], y)


def test_what_has_no_kernel_says_why(trusted):
    with launch.using(make):
        assert choose.plan(SMALL, (64, 64), mx.float32).by_kernels
        assert "values of 128 dims" in choose.plan(SMALL, (64, 128), mx.float32).reason
        polar = dataclasses.replace(SMALL, keys=Side(Polar(2, 4)))
        assert "radius int2 and angle int4" in choose.plan(polar, (64, 64), mx.float32).reason
        assert (
            "groups of 48"
            in choose.plan(
                dataclasses.replace(SMALL, keys=Side(Affine(4, 48))), (96, 96), mx.float32
            ).reason
        )
    with launch.using(None):
        assert choose.plan(SMALL, (64, 64), mx.float32).reason == "no GPU here"


def test_an_environment_variable_keeps_to_plain_ops(monkeypatch, trusted):
    monkeypatch.setattr(launch, "device_type", lambda: "metal")
    assert launch.kernel_builder() is mx.fast.metal_kernel
    monkeypatch.setenv(launch.SWITCH, "0")
    assert launch.kernel_builder() is None
    assert choose.plan(SMALL, (64, 64), mx.float32).reason == "MLXKV_KERNELS=0"
    with launch.using(make):  # a test that hands in a factory of its own means it
        assert launch.kernel_builder() is make
    cache = CompressedKVCache(SMALL)
    with launch.using(make):
        x = mx.array(data(1, 2, 200, 64))
        cache.update_and_fetch(x, x)
        view, _ = cache.keys_and_values()
        q = mx.array(data(1, 4, 1, 64))
        mask = mx.arange(200)[None] >= 150  # no kernel: still right
        out = attend(q, view, 0.125, mask)
    keys, values = attention.decode_all(view, mx.float32)
    spec = softmax(q, keys[:, :, 150:], values[:, :, 150:], 0.125)
    assert rms(out, spec) < 2e-6


def test_models_decode_by_kernels_as_by_plain_ops(subtests, trusted):
    """Through mlx-lm's own loop: prefill, decoding, pages quantized on the way; attention sinks too."""
    for factory, family, dtype, same in (
        (make, "gpt_oss", mx.float32, 26),
        (make_tiles, "llama", mx.float16, 20),  # then rounding may part them
    ):
        model, prompt, spoken = random_model(family), mx.arange(90) % 50, []
        model.set_dtype(dtype)
        for made in (factory, None):
            with subtests.test(family=family, made=made), launch.using(made):
                reports = [r.kernel for r in attach(model, SMALL) if r.compressed]
                assert all(("(no GPU here)" in kernel) == (made is None) for kernel in reports)
                assert all(("tile" in kernel) == (made is make_tiles) for kernel in reports)
                cache = make_prompt_cache(model)
                steps = generate_step(prompt, model, max_tokens=26, prompt_cache=cache)
                spoken.append([int(token) for token, _ in steps])
                stores = {type(c.store) for c in cache if isinstance(c, CompressedKVCache)}
                assert stores == {Records if made else Codes}
                detach(model)
        assert spoken[0][:same] == spoken[1][:same]


def test_a_kernel_that_is_wrong_or_does_not_build_is_not_used():
    def broken(name, input_names, output_names, source, header=""):
        good = make(name, input_names, output_names, source, header)
        if "merge" not in name:
            return good
        return lambda **call: [1.1 * x for x in good(**call)]

    def unbuildable(**names):
        raise RuntimeError("[metal] cannot compile\nmore")

    x = mx.array(data(1, 2, 200, 64))
    for factory, reason in ((broken, "attend is off by 0.1"), (unbuildable, "cannot compile")):
        with launch.using(factory):
            assert reason in choose.plan(SMALL, (64, 64), mx.float32).reason
            cache = CompressedKVCache(SMALL)
            cache.update_and_fetch(x, x)
            assert type(cache.store) is Codes


def test_a_wrong_tile_product_is_not_used():
    """Functions of the lane map, broken: the self-test has to refuse the tiles."""
    faults = [
        ("a.w[2 * k + h]", "a.w[2 * h + k]"),
        ("value += simd_shuffle_xor(value, ushort(4));\nreturn", "return"),
        ("b.w[1] = kv_halves(c.v[2], c.v[3]);", "b.w[1] = kv_halves(c.v[3], c.v[2]);"),
    ]
    for good, bad in faults:

        def broken(name, input_names, output_names, source, header="", good=good, bad=bad):
            if "tile" in name:
                assert good in header, good
                header = header.replace(good, bad)
            return make(name, input_names, output_names, source, header)

        reason = selftest.test(PRESETS["srft-int2+g32"], 64, mx.float16, TileBackend(broken)).reason
        assert reason is not None, good


def test_the_reason_why_not():
    both = RecordLayout(*(layout(4, 64, False, 128, side) for side in (True, False)))
    wide = RecordLayout(*(layout(4, 64, False, 512, side) for side in (True, False)))
    many = RecordLayout(*(layout(4, 16 * 2, False, 288, side) for side in (True, False)))
    assert tiles.why_not(both, 128, mx.float16, make_tiles) is None
    assert "no tiles" in tiles.why_not(both, 128, mx.float16, make)
    assert "16-bit types, not float32" in tiles.why_not(both, 128, mx.float32, make_tiles)
    assert "multiple of 8" in tiles.why_not(both, 100, mx.float16, make_tiles)
    assert "256 dims" in tiles.why_not(wide, 512, mx.float16, make_tiles)
    assert tiles.why_not(many, 288, mx.float16, make_tiles) is not None
