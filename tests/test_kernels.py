"""Every kernel in the emulator, with all its checks, against the plain ops and the spec."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from on_emulator import make
from random_models import random_model

from mlxkv import attention, golden, kernels, records, sealed
from mlxkv.attention import attend
from mlxkv.cache import CompressedKVCache
from mlxkv.config import Affine, CacheConfig, Polar, Side
from mlxkv.metal import launch
from mlxkv.models import attach, detach
from mlxkv.presets import PRESETS
from mlxkv.quantizers import affine
from mlxkv.sealed import Codes, Records

DIMS = (64, 80, 96, 128, 192, 256, 512)


def data(*shape, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    x[..., 3] *= 6
    return x


def rms(x, spec):
    x, spec = (np.array(y.astype(mx.float32), np.float64) for y in (x, spec))
    return np.sqrt(np.mean((x - spec) ** 2) / np.mean(spec**2))


def layout(bits, group, symmetric, dims, keys):
    return records.layout(Affine(bits, group, symmetric), dims, 64, keys)


@pytest.mark.parametrize("keys", (True, False))
@pytest.mark.parametrize("bits", (2, 3, 4, 8))
@pytest.mark.parametrize(
    ("dims", "group", "symmetric"),
    [
        (64, 32, True),
        (80, 64, False),
        (96, 64, False),
        (128, 64, False),
        (192, 0, False),
        (256, 32, True),
        (512, 64, False),
        (40, 0, True),
    ],
)
def test_records_hold_the_codes_and_come_back(dims, bits, group, symmetric, keys):
    at = layout(bits, group, symmetric, dims, keys)
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (1, 2, 48, dims))
    scale, bias = (rng.standard_normal((1, 2, 48, at.groups)).astype(np.float16) for _ in range(2))
    words = records.pack_side(mx.array(codes), mx.array(scale), mx.array(bias), at)
    assert words.shape == (1, 2, 3, at.words)
    back, s, b = records.unpack_side(words, at)
    np.testing.assert_array_equal(np.array(back), codes)
    np.testing.assert_array_equal(np.array(s), scale)
    assert (b is None) == symmetric
    if not symmetric:
        np.testing.assert_array_equal(np.array(b), bias)


@pytest.mark.parametrize("keys", (True, False))
@pytest.mark.parametrize("dims", (64, 80, 128, 40))
def test_unseal_is_its_twin(dims, keys):
    specs = Affine(3, 64), Affine(8, 32, True)
    whole = kernels.RecordLayout(
        *(
            records.layout(spec, dims, 64, side)
            for spec, side in zip(specs, (True, False), strict=True)
        )
    )
    pair = [mx.array(data(1, 2, 48, dims, seed=i)) for i in range(2)]
    buffer = kernels.seal(pair, whole, make)
    decoded = kernels.unseal_side(buffer, 2, whole, keys, mx.float32, make)
    spec = specs[0 if keys else 1]
    stored = affine.encode(spec, pair[0 if keys else 1], 16)
    plain = affine.decode(spec, stored, dims, 16, mx.float32)[:, :, :32]
    assert rms(decoded, plain) < 3e-6


# D, H, G, L, records, sink, live, key bits, value bits, window, dtype
ATTEND = [
    (64, 4, 1, 1, 4, 16, 20, 4, 4, 0, mx.float16),
    (64, 6, 1, 8, 5, 16, 33, 4, 2, 0, mx.bfloat16),
    (96, 10, 2, 3, 3, 0, 17, 3, 8, 0, mx.float32),
    (80, 2, 2, 4, 4, 16, 63, 2, 3, 70, mx.float32),
    (128, 4, 1, 1, 17, 16, 1, 8, 4, 0, mx.float32),
    (64, 6, 2, 1, 0, 0, 40, 4, 4, 0, mx.float32),
    (256, 4, 1, 2, 3, 5, 31, 4, 4, 0, mx.float16),
    (192, 3, 3, 1, 2, 16, 16, 4, 3, 0, mx.float32),
    (40, 16, 1, 1, 3, 16, 7, 4, 4, 0, mx.float32),
]


@pytest.mark.parametrize("case", ATTEND, ids=lambda c: "-".join(map(str, c[:-1])))
@pytest.mark.parametrize("sinks", (False, True))
def test_attend_is_softmax_over_what_is_stored(case, sinks):
    dims, heads, kv_heads, new, count, n_sink, n_live, k_bits, v_bits, window, dtype = case
    both = layout(k_bits, 64, False, dims, True), layout(v_bits, 32, True, dims, False)
    whole = kernels.RecordLayout(*both)
    x = [mx.array(data(1, kv_heads, (count + 2) * 16, dims, seed=i)) for i in range(2)]
    buffer = kernels.seal(x, whole, make)
    paged = [
        kernels.unseal_side(buffer, count + 2, whole, side, mx.float32, make)[:, :, : count * 16]
        for side in (True, False)
    ]
    shape = (1, kv_heads, n_sink + n_live + 7, dims)
    windows = [mx.array(data(*shape, seed=2 + i)).astype(dtype) for i in range(2)]
    sink = tuple(y[:, :, :n_sink] for y in windows) if n_sink else None
    live = tuple(y[:, :, n_sink:] for y in windows)  # 7 tokens more than are in use
    q = mx.array(data(1, heads, new, dims, seed=9)).astype(dtype)
    grouped = q.reshape(1, kv_heads, -1, dims)
    up = mx.array(np.linalg.qr(data(dims, dims, seed=5))[0])
    logits = mx.array(data(16, seed=6)[:heads]) if sinks else None
    out = kernels.attend(
        grouped.astype(mx.float32),
        grouped,
        buffer,
        whole,
        sink,
        live,
        ((count, n_sink, n_live),),
        dims**-0.5,
        new,
        make,
        up=up,
        window=window,
        sinks=logits,
    ).reshape(q.shape)
    paged[1] = paged[1] @ up
    keys, values = (
        mx.concatenate([w[:, :, :n_sink], p, w[:, :, n_sink : n_sink + n_live]], 2)
        for w, p in zip(windows, paged, strict=True)
    )
    spec = softmax(q, keys, values, dims**-0.5, window, logits)
    bound = {mx.float32: 2e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3}[dtype]
    assert rms(out, spec) < bound


def softmax(q, keys, values, scale, window, sinks):
    from mlxkv import reference as ref

    q, keys, values = (np.array(y.astype(mx.float32), np.float64) for y in (q, keys, values))
    mask = ref.causal_mask(q.shape[2], keys.shape[2], window or None)
    sinks = None if sinks is None else np.array(sinks, np.float64)
    return mx.array(ref.attention(q, keys, values, scale, mask, sinks).astype(np.float32))


def test_the_golden_table_holds_with_kernels():
    with launch.using(make):
        rows = list(golden.attention_rows())
    assert len(rows) == 10
    assert not [row for row in rows if not row.ok]


SMALL = CacheConfig(
    Side(Affine(4), "srft"), Side(Affine(3), "hadamard"), sink=16, recent=32, page=32
)


TIES = 5e-3  # rms of an output when one code, on a rounding tie, falls to the other side


def same_but_ties(x, spec):
    """At most 1 % of the tokens differ, and by what a few of their codes may be off."""
    off = np.abs(np.array(x) - np.array(spec)).max(-1)
    assert (off > 1e-4).mean() < 0.01
    assert rms(x, spec) < 2e-2


def caches():
    with launch.using(make):
        return CompressedKVCache(SMALL), CompressedKVCache(SMALL)


def walk(factory, dtype, bound):
    """The same steps through kernels and through plain ops: (cache of records, cache of codes)."""
    keys, values = data(1, 2, 300, 64), data(1, 2, 300, 64, seed=1)
    queries = mx.array(data(1, 6, 300, 64, seed=2)).astype(dtype)
    ours, plain = CompressedKVCache(SMALL), CompressedKVCache(SMALL)
    done = 0
    for step in (100, 1, 7, 40, 1, 60, 8, 1):
        part = slice(done, done + step)
        new = tuple(mx.array(x[:, :, part]).astype(dtype) for x in (keys, values))
        mask = "causal" if step > 1 else None
        with launch.using(factory):
            view, _ = ours.update_and_fetch(*new)
            if step <= 8:
                assert attention.why_not(queries[:, :, part], view, mask) is None
            out = attend(queries[:, :, part], view, 0.125, mask)
        with launch.using(None):
            spec = attend(queries[:, :, part], plain.update_and_fetch(*new)[0], 0.125, mask)
        assert rms(out, spec) < bound
        done += step
    return ours, plain


def test_a_cache_of_records_gives_what_a_cache_of_codes_gives():
    ours, plain = walk(make, mx.float32, TIES)
    assert type(ours._store) is Records
    assert type(plain._store) is Codes
    assert ours.nbytes <= plain.nbytes * 1.02
    # trim into a page, with what is left the same
    for cache in (ours, plain):
        assert cache.trim(120) == 120
    a, b = (attention._whole(c.keys_and_values()[0], mx.float32) for c in (ours, plain))
    same_but_ties(a[0], b[0])
    same_but_ties(a[1], b[1])


@pytest.mark.parametrize("start", (make, None))
def test_each_store_reads_what_the_other_saved(start):
    keys, values = mx.array(data(1, 2, 200, 64)), mx.array(data(1, 2, 200, 64, seed=1))
    cache = CompressedKVCache(SMALL)
    with launch.using(start):
        cache.update_and_fetch(keys, values)
        before = attention._whole(cache.keys_and_values()[0], mx.float32)
    with launch.using(None if start else make):
        other = CompressedKVCache.from_state(cache.state)
        assert type(other._store) is not type(cache._store)
        after = attention._whole(other.keys_and_values()[0], mx.float32)
    for x, y in zip(before, after, strict=True):
        assert rms(x, y) < 2e-6
    back = CompressedKVCache.from_state(other.state)  # and what was saved is kept to the bit
    with launch.using(start):
        again = CompressedKVCache.from_state(back.state)
    for x, y in zip(cache._store.arrays(), again._store.arrays(), strict=True):
        assert mx.array_equal(x[:, :, : y.shape[2]], y)


def test_what_has_no_kernel_says_why():
    with launch.using(make):
        assert sealed.why_not(SMALL, (64, 64), mx.float32) is None
        assert "values of 128 dims" in sealed.why_not(SMALL, (64, 128), mx.float32)
        polar = dataclasses.replace(SMALL, keys=Side(Polar(2, 4)))
        assert "radius int2 and angle int4" in sealed.why_not(polar, (64, 64), mx.float32)
        assert "groups of 48" in sealed.why_not(
            dataclasses.replace(SMALL, keys=Side(Affine(4, 48))), (96, 96), mx.float32
        )
    with launch.using(None):
        assert sealed.why_not(SMALL, (64, 64), mx.float32) == "no GPU here"


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].compresses])
def test_every_preset_has_records_or_a_reason(name):
    config = PRESETS[name]
    reasons = [
        records.why_not(side.quantizer, 128, config.page, side is config.keys)
        for side in (config.keys, config.values)
    ]
    assert any(reasons) == (name in ("turbo-3.5", "turbo-2.5")), reasons


@pytest.mark.slow
@pytest.mark.parametrize("name", ("turbo-int3", "kivi-int2", "kvarn-int4", "polar"))
def test_kernels_of_other_methods_pass_their_own_test(name):
    """Those of the rest in tests of their own; of balanced presets in test_balanced.py."""
    with launch.using(make):
        assert sealed.why_not(PRESETS[name], (64, 64), mx.float32) is None


def test_an_environment_variable_keeps_to_plain_ops(monkeypatch):
    monkeypatch.setattr(launch, "backend", lambda: "metal")
    assert launch.factory() is mx.fast.metal_kernel
    monkeypatch.setenv(launch.SWITCH, "0")
    assert launch.factory() is None
    assert sealed.why_not(SMALL, (64, 64), mx.float32) == "MLXKV_KERNELS=0"
    with launch.using(make):  # a test that hands in a factory of its own means it
        assert launch.factory() is make
    cache = CompressedKVCache(SMALL)
    with launch.using(make):
        x = mx.array(data(1, 2, 200, 64))
        cache.update_and_fetch(x, x)
        view, _ = cache.keys_and_values()
        q = mx.array(data(1, 4, 1, 64))
        assert "mask array" in attention.why_not(q, view, mx.ones((1, 200), mx.bool_))
        assert "prefill" in attention.why_not(mx.array(data(1, 4, 9, 64)), view, "causal")
        mask = mx.arange(200)[None] >= 150  # no kernel: still right
        out = attend(q, view, 0.125, mask)
    keys, values = attention._whole(view, mx.float32)
    spec = softmax(q, keys[:, :, 150:], values[:, :, 150:], 0.125, 0, None)
    assert rms(out, spec) < 2e-6


@pytest.mark.parametrize("family", ("llama", "gpt_oss"))
def test_a_model_decodes_by_kernels_as_by_plain_ops(family):
    """Through mlx-lm's own loop: prefill, decoding, pages sealed on the way; attention sinks too."""
    model, prompt = random_model(family), mx.arange(90) % 50
    spoken, kernels_named = [], []
    for factory in (make, None):
        with launch.using(factory):
            reports = attach(model, SMALL)
            kernels_named.append({r.kernel for r in reports if r.compressed})
            cache = make_prompt_cache(model)
            steps = generate_step(prompt, model, max_tokens=60, prompt_cache=cache)
            spoken.append([int(token) for token, _ in steps])
            stores = {type(c._store) for c in cache if isinstance(c, CompressedKVCache)}
            assert stores == {Records if factory else Codes}
            detach(model)
    assert spoken[0] == spoken[1]
    assert "plain ops (no GPU here)" not in kernels_named[0]
    assert kernels_named[1] == {"plain ops (no GPU here)"}


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
            assert reason in sealed.why_not(SMALL, (64, 64), mx.float32)
            cache = CompressedKVCache(SMALL)
            cache.update_and_fetch(x, x)
            assert type(cache._store) is Codes
