"""Kernels on codebook codes in the emulator, with all its checks, against the plain ops and the spec."""

import dataclasses

import mlx.core as mx
import numpy as np
from on_emulator import layout, make, unpack_side
from samples import data

from mlxkv.codec import transform
from mlxkv.formats import levels
from mlxkv.formats.quantizers import Codebook
from mlxkv.metal import attend, quantize
from mlxkv.spec import codebook as ref

NEAR = 1e-5  # of a boundary, for coordinates of a unit vector


def check(words, x, spec, at, down=None):
    """The side `at` of records against the spec's codes of x @ down, boundaries aside."""
    codes, norms, bias = (None if y is None else np.array(y) for y in unpack_side(words, at))
    assert bias is None
    stored = np.array(x.astype(mx.float32), np.float64)
    stored = stored if down is None else stored @ np.array(down, np.float64)
    table = ref.sphere_levels(at.dims, spec.bits)
    want, scale = ref.codebook_encode(stored, table)
    off = np.abs(norms - scale) > np.spacing(scale.astype(np.float16))
    assert off.mean() < 1e-9
    norm = np.sqrt((stored**2).sum(-1, keepdims=True))
    unit = stored / np.where(norm > 0, norm, 1)
    gap = np.abs(unit[..., None] - (table[1:] + table[:-1]) / 2).min(-1)
    wrong = (codes != want) & (norm > 0)
    assert not (wrong & (gap > NEAR)).any()
    assert wrong.mean() < 1e-3


CASES = [  # dims, bits, transform, dtype
    (64, 4, "random", mx.bfloat16),
    (40, 3, "none", mx.float32),
]


def test_quantize_gives_the_codes_of_the_spec(subtests):
    for dims, bits, name, dtype in CASES:
        with subtests.test(dims=dims, bits=bits, name=name):
            made = transform.make(name, dims, 3)
            pair = [mx.array(data(2, 2, 32, dims, seed=i)).astype(dtype) for i in range(2)]
            pair[0][1, 0, 3] = 0.0
            specs = Codebook(bits), Codebook(2)
            whole = layout(specs, (dims, dims))
            words = quantize.quantize_pages(pair, whole, make, (made, made))
            split, down = whole.keys.words, None if made is None else made.down
            check(words[..., :split], pair[0], specs[0], whole.keys, down)
            check(words[..., split:], pair[1], specs[1], whole.values, down)
            swapped = quantize.quantize_pages(
                pair[::-1], layout(specs[::-1], (dims, dims)), make, (made, made)
            )
            check(
                swapped[..., -split:],
                pair[0],
                specs[0],
                dataclasses.replace(whole.keys, keys=False),
                down,
            )


def test_what_is_no_number_stays_none_and_large_norms_stay_finite():
    x = data(1, 1, 16, 64)
    x[0, 0, 2, 5], x[0, 0, 7] = np.nan, 1e8
    whole = layout((Codebook(4),) * 2, (64, 64))
    run = attend.Run(quantize.quantize_pages([mx.array(x)] * 2, whole, make), 1, whole)
    for side in (True, False):
        y = np.array(attend.dequantize_side(run, side, mx.float32, make))[0, 0]
        assert np.isnan(y[2]).all()
        assert np.isfinite(np.delete(y, 2, 0)).all()


def test_a_polynomial_goes_through_all_levels():
    for dims in (16, 64, 80, 128, 512):
        for bits in (1, 2, 3, 4):
            c = levels.polynomial(dims, bits).astype(np.float32)
            u = ((np.arange(2**bits) - (2**bits - 1) / 2) / 2**bits).astype(np.float32)
            total = np.zeros_like(u)
            for one in c[::-1]:
                total = (total * u * u + one).astype(np.float32)
            np.testing.assert_allclose(total * u, levels.sphere(dims, bits), rtol=5e-7)
