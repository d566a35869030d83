"""KVarN's tiles balanced by the kernel, in the emulator, as by plain ops."""

import mlx.core as mx
import numpy as np
import pytest
from on_emulator import make

from mlxkv.cache.stores import Codes, Records
from mlxkv.codec import dual_scale
from mlxkv.formats.config import CacheConfig, DualScale, Side
from mlxkv.metal import balance


def tiles(tokens, dims, seed=0):
    """With tokens and channels of very different sizes, and channels far from zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, 2, 2, tokens, dims))
    x *= np.exp(0.5 * rng.standard_normal((1, 2, 2, 1, dims)))
    x *= np.exp(0.7 * rng.standard_normal((1, 2, 2, tokens, 1)))
    return mx.array((x + 3 * rng.standard_normal((1, 2, 2, 1, dims))).astype(np.float32))


@pytest.mark.parametrize(
    ("tokens", "dims", "axis", "unit_std"),
    [
        (128, 64, "channel", False),
        (64, 128, "token", True),
        (32, 96, "token", False),
        (128, 128, "channel", True),
    ],
)
def test_the_kernel_balances_as_plain_ops_do(tokens, dims, axis, unit_std):
    x = tiles(tokens, dims)
    found = balance.balance(x, axis, unit_std, make)
    for ours, plain in zip(found, dual_scale.balance(x, axis, unit_std), strict=True):
        assert ours.shape == plain.shape
        np.testing.assert_allclose(np.array(ours), np.array(plain), rtol=1e-5)


def test_what_is_no_number_and_what_is_zero():
    """As plain ops: a tile with a NaN keeps scales of 1, one of zeros those of the floor."""
    x = np.array(tiles(32, 32))
    x[0, 0, 0, 3, 4], x[0, 1, 1] = np.nan, 0.0
    found = balance.balance(mx.array(x), "channel", False, make)
    for ours, plain in zip(found, dual_scale.balance(mx.array(x), "channel"), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(plain), rtol=1e-5)
        assert (np.array(ours)[0, 0, 0] == 1).all()


def test_pages_are_sealed_by_it():
    asked = []

    def spy(name, *args, **texts):
        asked.append(name)
        return make(name, *args, **texts)

    def named(**texts):
        return spy(**texts)

    sides = Side(DualScale(4, "channel"), "srft"), Side(DualScale(2, "token"), "srft")
    config = CacheConfig(*sides, page=64)
    pair = [tiles(64, 64, i).reshape(1, 2, 128, 64) for i in range(2)]
    ours, plain = Records(config, (64, 64), named), Codes(config, (64, 64))
    for store in (ours, plain):
        store.append(tuple(pair), 2)
    assert any("balance" in name for name in asked)
    back = Codes(config, (64, 64))
    back.restore(ours.state, 2)
    for side in (0, 1):
        x, y = (s.read(0, 2).decode(side, mx.float32) for s in (back, plain))
        assert (mx.abs(x - y) > 1e-3).astype(mx.float32).mean().item() < 1e-3


def test_tiles_that_do_not_fit_say_why():
    assert balance.why_not(128, 128) is None
    assert "do not fit in registers" in balance.why_not(128, 256)
    assert "not shared evenly" in balance.why_not(128, 80)
    assert balance.helpers(make, 128, 80) == {}
