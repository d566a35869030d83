"""PolarQuant of Han et al.: its angles, its distortion, codebooks of three kinds."""

import mlx.core as mx
import numpy as np
import pytest
from samples import normal, off

from mlxkv.codec import polar_tree
from mlxkv.codec.codec import Codec
from mlxkv.errors import UserError
from mlxkv.formats import levels
from mlxkv.formats.config import Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import PolarTree
from mlxkv.spec import polar_tree as ref

DIMS = (64, 80, 96, 128, 256)


def decoded(spec, x, dims):
    code = Codec(Side(spec, "random"), dims, 64)
    return code.decode(code.encode(mx.array(x)), mx.float32)


def test_codebooks_are_centroids_of_the_density_which_is_that_of_the_data(subtests):
    for level in (1, 2, 3, 4):
        with subtests.test(level=level):
            book = levels.angles(level, ref.BITS[level - 1])
            np.testing.assert_allclose(book, ref.angle_codebook(level), atol=1e-12)
            end = ref.TURN if level == 1 else np.pi / 2
            edges = np.concatenate([[0], (book[1:] + book[:-1]) / 2, [end]])
            fine = np.linspace(0, end, 200_001)
            density = ref.angle_density(fine, level)
            for angle, low, high in zip(book, edges, edges[1:], strict=False):
                inside = (fine >= low) & (fine <= high)
                assert abs(np.average(fine[inside], weights=density[inside]) - angle) < 2e-4
            _, angles = ref.to_polar(normal(4000, 128).astype(np.float64))
            found, _ = np.histogram(angles[level - 1], 40, (0, end), density=True)
            middles = (np.arange(40) + 0.5) * end / 40
            want = ref.angle_density(middles, level)
            assert np.abs(found - want / want.mean() / end).max() < 0.05 * found.max() + 0.01


def test_distortion_is_that_of_the_method(subtests):
    for dims in DIMS:
        with subtests.test(dims=dims):
            x = normal(1, 1, 1024, dims)
            assert off(decoded(PolarTree(), x, dims), x) == pytest.approx(0.032, rel=0.03)
            spikes = np.random.default_rng(1).permuted(
                np.tile(np.arange(dims) == 7, (1024, 1)), axis=1
            )
            spiked = x * np.where(spikes, 30, 1)
            assert off(decoded(PolarTree(), spiked, dims), spiked) == pytest.approx(0.032, rel=0.06)


def test_rows_of_zeros_and_what_is_no_number_stay_by_themselves():
    x = normal(1, 1, 64, 64)
    x[0, 0, 3], x[0, 0, 5, 7] = 0.0, np.nan
    for spec in (PolarTree(), PolarTree(online=True)):
        y = np.array(decoded(spec, x, 64))[0, 0]
        assert not y[3].any()
        assert np.isnan(y[5]).all()
        assert np.isfinite(np.delete(y, 5, 0)).all()
        assert off(np.delete(y, 5, 0), np.delete(x[0, 0], 5, 0)) < 0.04


def test_bits_and_bad_values():
    assert PRESETS["polar-tree"].bits_per_value(80, 128) == 3.875
    assert PRESETS["polar-tree+online"].bits_per_value(128, 128) == 3.875 + 28 * 16 / 64 / 128
    assert "multiple of 16 dims, here are 72" in PRESETS["polar-tree"].why_not(72, 72)
    with pytest.raises(UserError, match="16, 4, 4 and 4 angles; got 2, 2"):
        PolarTree(((1, 2), (1, 2)))
    good = polar_tree.fit(mx.array(normal(256, 64)))
    with pytest.raises(UserError, match="must ascend"):
        PolarTree((good[0][::-1], *good[1:]))
    with pytest.raises(UserError, match="given or online"):
        PolarTree(good, online=True)
