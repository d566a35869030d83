"""KVarN: what its scales do, its numbers in the notes, and that nothing upsets it."""

import mlx.core as mx
import numpy as np
import pytest
from random_models import random_model

from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.codec import dual_scale
from mlxkv.codec.codec import Codec
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, DualScale, Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.presets import PRESETS
from mlxkv.models import attach, detach
from mlxkv.spec import affine as ref
from mlxkv.spec import dual_scale as spec

AXES = ("channel", "token")
PAGE = 128


def tiles(count=4, dims=128, tokens=PAGE, seed=0):
    """Normal values behind lognormal spreads of channels (.5) and tokens (.7), of standard deviation
    1."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, tokens, dims))
    x *= np.exp(0.5 * rng.standard_normal((count, 1, dims)))
    x *= np.exp(0.7 * rng.standard_normal((count, tokens, 1)))
    return x / x.std((1, 2), keepdims=True)


def nmse(x, y):
    return float(((x - y) ** 2).sum() / (x**2).sum())


def coded(x, bits, axis, unit_std=False, quantile=0.0):
    return spec.decode(*spec.encode(x, bits, axis, unit_std, quantile))


def test_small_tiles_are_plain_min_max_unless_the_floor_is_mended():
    """Papers' notes: .635, .118, .0225 against .239, .044, .0095 at 2, 3, 4 bits."""
    x = tiles(8) * 0.05
    published, mended = ([nmse(x, coded(x, b, "channel", u)) for b in (2, 3, 4)] for u in (0, 1))
    assert published == pytest.approx([0.635, 0.118, 0.0225], rel=0.15)
    assert mended == pytest.approx([0.239, 0.044, 0.0095], rel=0.05)
    for bits, error in zip((2, 3, 4), published, strict=True):
        plain = ref.affine_decode(
            *ref.affine_encode(x, bits, PAGE, axis="channel"), PAGE, "channel"
        )
        assert error == pytest.approx(nmse(x, plain), rel=0.01)


def test_large_tiles_need_no_mending():
    x = tiles()
    for size in (1.0, 8.0):
        published, mended = (nmse(x, coded(x * size, 2, "channel", u) / size) for u in (0, 1))
        assert published == pytest.approx(mended, rel=0.06)


def test_clipping_pays_at_two_bits():
    x = tiles()
    whole, clipped = (nmse(x, coded(x, 2, "channel", True, q)) for q in (0.0, 0.02))
    assert clipped < 0.65 * whole
    assert nmse(x, coded(x, 4, "channel", True, 0.02)) > 2 * nmse(x, coded(x, 4, "channel", True))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("unit", (False, True))
@pytest.mark.parametrize("size", (0.01, 0.5, 1.0, 300.0))
def test_the_imbalance_never_rises(axis, unit, size):
    x = tiles(seed=1) * size
    tokens, channels = spec.balance(x, axis, unit)
    before, after = spec.imbalance(x), spec.imbalance(x / tokens / channels)
    assert (after <= before * (1 + 1e-12)).all()
    if unit or size >= 1:
        assert (after < 0.5 * before).all()


@pytest.mark.parametrize("axis", AXES)
def test_a_tile_of_unit_std_gives_the_same_codes_at_any_size(axis):
    x = mx.array(tiles(1)[None].astype(np.float16).astype(np.float32))
    first, small = (
        dual_scale.encode(DualScale(3, axis, unit_std=True), x * size, PAGE)
        for size in (1.0, 2.0**-6)
    )
    assert mx.array_equal(first["codes"], small["codes"])
    assert mx.array_equal(first["outer"], small["outer"])
    published = [
        dual_scale.encode(DualScale(3, axis), x * s, PAGE)["codes"] for s in (1.0, 2.0**-6)
    ]
    assert not mx.array_equal(*published)


@pytest.mark.parametrize("dims", (64, 80, 96, 128, 256))
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(
    ("bits", "unit", "quantile"), [(2, True, 0.0), (3, False, 0.01), (4, True, 0)]
)
def test_plain_ops_give_the_spec(dims, axis, bits, unit, quantile):
    """Outer scales to a float16 step, and values where all of them are the same."""
    x = tiles(2, dims, 64, seed=dims)[None].astype(np.float16).astype(np.float64) * 3
    form = DualScale(bits, axis, unit, quantile)
    stored = dual_scale.encode(form, mx.array(x.reshape(1, 1, 128, dims).astype(np.float32)), 64)
    codes, scale, bias, outer = spec.encode(x, bits, axis, unit, quantile)
    found = np.array(stored["outer"]).astype(np.float64).reshape(outer.shape)
    assert (np.abs(found - outer) <= np.spacing(outer.astype(np.float16))).all()
    given = dual_scale.encode_balanced(
        form, mx.array(x.astype(np.float32))[:, None], mx.array(outer)[:, None]
    )
    ours = np.array(dual_scale.decode(form, given, dims, 64, mx.float32)).reshape(x.shape)
    right = spec.decode(codes, scale, bias, outer)
    assert (np.abs(ours - right) > 1e-5 * np.abs(x).max()).mean() < 2e-4


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("unit", (False, True))
@pytest.mark.parametrize("quantile", (0.0, 0.01))
@pytest.mark.parametrize("what", ("zero", "constant", "huge", "one", "rows"))
def test_nothing_becomes_nan(axis, unit, quantile, what):
    x = {
        "zero": np.zeros((PAGE, 64)),
        "constant": np.full((PAGE, 64), -1.5),
        "huge": np.where(tiles(1, 64)[0] > 0, 6e4, -6e4),
        "one": np.where(np.arange(PAGE * 64).reshape(PAGE, 64) == 77, 3e4, 0.0),
        "rows": np.where(np.arange(PAGE)[:, None] % 2, tiles(1, 64)[0], 0.0),
    }[what]
    form = DualScale(2, axis, unit, quantile)
    stored = dual_scale.encode(form, mx.array(x.astype(np.float32))[None, None], PAGE)
    y = np.array(dual_scale.decode(form, stored, 64, PAGE, mx.float32))[0, 0]
    assert np.isfinite(y).all()
    assert all(
        mx.isfinite(number).all().item() for name, number in stored.items() if name != "codes"
    )
    if what in ("zero", "constant"):
        assert np.abs(y - x).max() <= 1e-3 * np.abs(x).max()
    if not quantile:  # within half a step, and what float16 leaves of the numbers
        _, scale, _, outer = dual_scale._parts(form, stored, 64, PAGE)
        step = np.array(outer * scale)[0, 0, 0]
        assert (np.abs(y - x) <= 0.501 * step + 2e-3 * np.abs(x).max()).all()
    if what == "huge":
        half = dual_scale.decode(form, stored, 64, PAGE, mx.float16)
        assert mx.isfinite(half).all().item()


def test_far_beyond_float16_is_cut_and_stays_finite():
    x = mx.array((tiles(1, 64)[None] * 1e25).astype(np.float32))
    for axis in AXES:
        form = DualScale(4, axis)
        y = dual_scale.decode(form, dual_scale.encode(form, x, PAGE), 64, PAGE, mx.float32)
        assert mx.isfinite(y).all().item()


def test_overhead_is_three_numbers_per_token_and_channel():
    """.375 bits a value of a tile of 128 x 128, and published sums."""
    expected = {"kvarn-int4": 4.375, "kvarn-k4v2": 3.375, "kvarn-int2": 2.375, "kvarn-int3": 3.375}
    for name, bits in expected.items():
        assert PRESETS[name].bits_per_value(128, 128) == bits
    for dims in (64, 80, 128):
        for axis in AXES:
            stored = dual_scale.encode(DualScale(2, axis), mx.zeros((1, 2, 2 * PAGE, dims)), PAGE)
            nbytes = sum(x.nbytes for x in stored.values())
            bits = DualScale(2, axis).bits_per_value(dims, PAGE)
            assert 8 * nbytes == bits * 2 * 2 * PAGE * dims


def test_head_dims_that_have_no_hadamard_take_the_fourier_transform():
    side = PRESETS["kvarn-int2"].keys
    for dims in (64, 80, 96, 128, 256):
        assert side.why_not(dims, PAGE) is None
        down = np.array(Codec(side, dims, PAGE).transform.down)
        np.testing.assert_allclose(down, spec.rotation(dims), atol=1e-6)


def test_reports_say_which_transform_stands_in():
    for dims, said in ((80, " (srft: 80 dims have no Hadamard)"), (64, "")):
        model = random_model("llama", head_dim=dims)
        reports = attach(model, "kvarn-int2")
        detach(model)
        assert {r.reason for r in reports if r.compressed} == {f"kvarn-int2{said}"}


def test_bad_values_are_refused():
    with pytest.raises(
        UserError, match=r"\[DualScale\] unknown bits; got 5; choose from 2, 3, 4, 8"
    ):
        DualScale(5, "token")
    with pytest.raises(UserError, match=r"unknown axis; got 'row'; choose from token, channel"):
        DualScale(2, "row")
    with pytest.raises(UserError, match=r"at least 0 and below .5; got 0.5"):
        DualScale(2, "token", quantile=0.5)
    side = Side(DualScale(2, "token"))
    assert "is no tile" in CacheConfig(side, side, page=16).why_not(64, 64)


@pytest.mark.parametrize(
    "name", ("kvarn-int4", "kvarn-k4v2", "kvarn-int2+fixed", "kivi-int2", "polar")
)
def test_a_saved_cache_comes_back_and_is_cut_back(name):
    keys, values = (mx.array(tiles(1, 64, 700, seed=n)[None].astype(np.float32)) for n in range(2))
    cache = CompressedKVCache(parse_kv(name))
    view, _ = cache.update_and_fetch(keys, values)
    view, _ = cache.keys_and_values()
    other = CompressedKVCache.from_state(cache.state)
    again, _ = other.keys_and_values()
    assert view.pages.tokens == again.pages.tokens > 0
    for side in (0, 1):
        assert mx.array_equal(
            view.pages.decode(side, mx.float32), again.pages.decode(side, mx.float32)
        )
    before = view.pages.decode(0, mx.float32)
    cache.cut(count := 200)
    assert cache.offset == count
    left, _ = cache.keys_and_values()
    kept = [left.sink[0]] if left.sink else []
    kept += [left.pages.decode(0, mx.float32)] if left.pages else []
    kept = mx.concatenate([*kept, left.live[0]], axis=2)
    sink = cache.config.sink
    assert kept.shape[2] == count
    assert mx.abs(kept[:, :, sink:] - before[:, :, : count - sink]).max().item() < 1e-6
