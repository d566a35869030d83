"""Kitty and SAW-INT4: what their papers say of them, in the law and in the presets."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.codec.codec import Codec
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Kitty, Side
from mlxkv.formats.presets import PRESETS
from mlxkv.spec import affine
from mlxkv.spec.mixed import kitty


def keys(tokens=128, dims=128):
    x = np.random.default_rng(0).standard_normal((2, tokens, dims))
    x[..., [3, 77]] *= 20
    return x


def test_the_largest_channels_take_four_bits_and_lose_a_fifth():
    x = keys()
    plain, few = np.zeros((2, 128), bool), kitty.boosted(x, 0.125)
    assert few.sum(-1).tolist() == [16, 16] and few[:, [3, 77]].all()
    codes, scale, bias, chosen = kitty.encode(x, 0.125)
    assert (chosen == few).all() and codes[:, :, 3].max() == 15 and codes.max(1)[~few].max() == 3
    error = ((kitty.decode(codes, scale, bias) - x) ** 2).mean(1)
    top = 3.0
    step = (x.max(1) - x.min(1)) / top
    assert (error[few] < (step**2)[few] / 12 / 20).all()  # 5 times smaller steps
    assert error[~few].mean() == pytest.approx((step**2)[~few].mean() / 12, rel=0.2)
    assert not plain.any()


def test_both_sets_of_two_bits_are_the_codes():
    codes, _, _, chosen = kitty.encode(keys(), 0.25)
    high, low = kitty.split(codes, chosen)
    assert high.max() <= 3 and low.max() <= 3 and low.shape == (2, 128, 32)
    for head in range(2):
        wide = codes[head][:, chosen[head]]
        assert (high[head][:, chosen[head]] * 4 + low[head] == wide).all()
        assert (high[head][:, ~chosen[head]] == codes[head][:, ~chosen[head]]).all()


def test_a_page_chooses_its_own_channels():
    x = keys(256)[None]
    x[:, :, 128:, [3, 77]] /= 20
    x[:, :, 128:, [9, 10]] *= 20
    stored = Codec(Side(Kitty(2 / 128)), 128, 128).encode(mx.array(x.astype(np.float32)))
    marks = np.unpackbits(np.array(stored["channels"]).view(np.uint8), axis=-1, bitorder="little")
    assert [np.flatnonzero(one).tolist() for one in marks[0, 0]] == [[3, 77], [9, 10]]


def test_presets_have_the_released_numbers():
    few, pro = PRESETS["kitty-int2"], PRESETS["kitty-int2+pro"]
    assert (few.sink, few.recent, few.page) == (32, 128, 128) == (pro.sink, pro.recent, pro.page)
    assert few.keys.bits_per_value(128, 128) == 2 + 0.25 + 0.25 + 1 / 128
    assert pro.keys.bits_per_value(128, 128) == 2 + 0.5 + 0.25 + 1 / 128
    assert few.values.bits_per_value(128, 128) == 2.25
    assert CacheConfig.from_dict(pro.as_dict()) == pro
    for name, bits in (("saw-int4", 4.25), ("saw-int4+values", 4.25)):
        saw = PRESETS[name]
        assert saw.bits_per_value(128, 128) == bits and (saw.sink, saw.recent) == (0, 0)
    with pytest.raises(UserError, match=r"\[Kitty\] share must be above 0"):
        Kitty(0.0)
    assert "is no channel" in Kitty(0.01).why_not(64, 128)


@pytest.mark.parametrize(("dims", "blocks"), [(64, 1), (128, 1), (256, 2), (96, 3), (80, 5)])
def test_blocks_of_hadamard_are_orthonormal_and_apart(dims, blocks):
    h = affine.block_hadamard(dims, 128)
    np.testing.assert_allclose(h @ h.T, np.eye(dims), atol=1e-13)
    size = dims // blocks
    np.testing.assert_allclose(np.abs(h[h != 0]), size**-0.5)
    assert (h != 0).sum() == dims * size and (h[:, 0] >= 0).all()  # no signs
