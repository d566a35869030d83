"""Clipping a token by a quantile of its absolute values: spec, formats, ops, and what reads them."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.codec import affine
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Affine
from mlxkv.spec import affine as ref


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_a_row_keeps_its_share_and_the_rest_takes_the_limit(subtests):
    for dims in (33, 64, 80, 128, 256):
        for clip in (0.999, 0.96, 0.92, 0.5, 0.001):
            with subtests.test(dims=dims, clip=clip):
                x = data(7, dims)
                clipped = ref.clip_rows(x, clip)
                kept = min(int(clip * dims) + 1, dims)
                assert ((clipped == x).sum(-1) == kept).all()
                limit = np.sort(np.abs(x), -1)[:, kept - 1, None]
                np.testing.assert_array_equal(
                    clipped, np.where(np.abs(x) > limit, np.sign(x) * limit, x)
                )
                assert Affine(2, clip=clip).clip_rank(dims) == dims - kept + 1


def test_the_share_is_meant_exactly():
    assert 0.29 * 100 < 29
    row = np.arange(100.0)
    assert ref.clip_rows(row, 0.29).max() == 29
    for dims in range(16, 513):
        for percent in range(1, 101):
            rank = Affine(2, clip=percent / 100).clip_rank(dims)
            assert rank == dims - min(percent * dims // 100, dims - 1)


def test_ties_zeros_and_one_huge_value():
    ties = np.tile([1.0, -2.0, 2.0, 0.5], 16)  # half of the values are as large as any
    np.testing.assert_array_equal(ref.clip_rows(ties, 0.92), ties)
    assert not ref.clip_rows(np.eye(64)[3] * 60000, 0.96).any()
    huge = data(64)
    huge[9] = -6e4
    assert np.abs(ref.clip_rows(huge, 0.96)).max() < 4


def test_ops_select_what_the_spec_sorts(subtests):
    for rank in (1, 2, 7, 64):
        with subtests.test(rank=rank):
            x = data(2, 3, 5, 64).astype(np.float16).astype(np.float32)
            x[0, 0, 0] = np.round(x[0, 0, 0])
            ours = affine.clip_rows(mx.array(x), rank)
            np.testing.assert_array_equal(np.array(ours), ref.clip_rows(x, 1 - rank / 64))


def test_a_format_with_a_clip():
    plain, clipped = Affine(2, 32), Affine(2, 32, clip=0.96)
    assert clipped.label == "int2 min-max, group 32 per token, clip .96"
    assert "clip" not in plain.label
    assert clipped.bits_per_value(128, 64) == plain.bits_per_value(128, 64)
    config = CacheConfig(Side(clipped, "srft"), Side(Affine(2, 32, clip=0.92)))
    assert CacheConfig.from_dict(config.as_dict()) == config


def test_shares_that_are_none(subtests):
    for clip in (0, -0.5, 1.01, float("nan")):
        with subtests.test(clip=clip):
            with pytest.raises(
                UserError, match=r"\[Affine\] clip must be above 0 and at most 1; got"
            ):
                Affine(2, clip=clip)
            broken = PRESETS["srft-int2+g32"].as_dict()
            broken["keys"]["quantizer"]["clip"] = "much"
            with pytest.raises(UserError, match="CacheConfig"):
                CacheConfig.from_dict(broken)
