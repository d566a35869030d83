"""TurboQuant: its codebooks and distortion figures, its second stage, and caches that use it."""

import mlx.core as mx
import numpy as np
import pytest
from samples import normal, off

from mlxkv.codec.codec import Codec
from mlxkv.errors import UserError
from mlxkv.formats import levels, matrices
from mlxkv.formats.config import Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Codebook
from mlxkv.spec import codebook as ref

PAPER = {1: 0.36, 2: 0.117, 3: 0.034, 4: 0.0095}  # Theorem 1, and its evaluation by simulation


def test_levels_are_centroids_between_midpoints(subtests):
    """By quadrature of the density, which neither the spec nor the package does."""
    for dims in (64, 96, 256):
        for bits in (1, 2, 3, 4):
            with subtests.test(dims=dims, bits=bits):
                table = levels.sphere(dims, bits)
                np.testing.assert_allclose(table, ref.sphere_levels(dims, bits), atol=1e-12)
                np.testing.assert_allclose(table, -table[::-1], atol=1e-14)
                edges = np.concatenate([[-1], (table[1:] + table[:-1]) / 2, [1]])
                nodes, weights = np.polynomial.legendre.leggauss(400)
                for level, low, high in zip(table, edges, edges[1:], strict=False):
                    x = low + (high - low) * (nodes + 1) / 2
                    mass = (1 - x * x) ** ((dims - 3) / 2) * weights
                    assert abs((mass * x).sum() / mass.sum() - level) < 1e-9


def test_random_rotations_are_uniform():
    np.testing.assert_allclose(matrices.random(80, 3), ref.random_rotation(80, 3), atol=1e-13)
    traces = [np.trace(matrices.random(20, seed)) for seed in range(300)]
    assert abs(np.mean(traces)) < 0.2  # 0 and 1 for the uniform measure
    assert abs(np.var(traces) - 1) < 0.3


def test_distortion_is_that_of_the_paper(subtests):
    for bits in PAPER:
        with subtests.test(bits=bits):
            x = mx.array(normal(1, 1, 2048, 128))
            code = Codec(Side(Codebook(bits), "random"), 128, 64)
            assert off(code.decode(code.encode(x), mx.float32), x) == pytest.approx(
                PAPER[bits], rel=0.04
            )
            # Whatever the vectors are: the rotation makes them all alike.
            spikes = np.random.default_rng(1).permuted(
                np.tile(np.arange(128) == 7, (2048, 1)), axis=1
            )
            spiked = mx.array(normal(1, 1, 2048, 128) * np.where(spikes, 50, 1).astype(np.float32))
            found = off(code.decode(code.encode(spiked), mx.float32), spiked)
            assert found == pytest.approx(PAPER[bits], rel=0.06)


def test_rows_of_zeros_and_what_is_no_number_stay_by_themselves():
    x = normal(1, 1, 64, 64)
    x[0, 0, 3], x[0, 0, 5, 7], x[0, 0, 6] = 0.0, np.nan, 1e30
    code = Codec(Side(Codebook(2), "random"), 64, 64)
    y = np.array(code.decode(code.encode(mx.array(x)), mx.float32))[0, 0]
    assert not np.nan_to_num(y[3]).any() and np.isfinite(y[3]).all()
    assert np.isnan(y[5]).all()  # never a number that looks right
    assert np.isfinite(np.delete(y, (5, 6), 0)).all()


def test_bad_values_are_one_line():
    with pytest.raises(UserError, match=r"unknown bits; got 5; choose from 1, 2, 3, 4"):
        Codebook(5)
    assert "16 dims or more" in PRESETS["turbo-int2"].why_not(8, 8)


def test_on_a_boundary_the_code_is_the_one_nearer_to_zero():
    """Alg. 1 of TurboQuant leaves it open; both tracks follow the spec."""
    levels = np.array([-1.0, -0.2, 0.2, 1.0])  # boundaries at 0.6, 0 and -0.6
    x = np.array([[0.6, 0.8], [-0.6, 0.8], [0.0, 1.0]])
    codes, scale = ref.codebook_encode(x, levels)
    assert codes.tolist() == [[2, 3], [1, 3], [1, 3]] and (scale == 1).all()
