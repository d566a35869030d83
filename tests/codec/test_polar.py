"""PolarQuant (Wu et al.): pairs, steps, look-ups."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.codec import polar
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.quantizers import Affine, Polar
from mlxkv.spec import polar as spec

PAGE = 128
BITS = ((4, 4), (3, 3), (2, 2), (2, 4), (4, 1))


def keys(dims=64, heads=2, pages=2, seed=0):
    """With an outlier pair that keeps its direction, as real keys have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, heads, pages * PAGE, dims))
    x[..., 2] += 9
    x[..., 2 + dims // 2] += 4
    return x.astype(np.float16).astype(np.float64)


def encoded(x, radius, angle):
    return polar.encode(Polar(radius, angle), mx.array(x.astype(np.float32)), PAGE)


def paged(x):
    return x.reshape(*x.shape[:2], -1, PAGE, x.shape[3])


def test_plain_ops_give_the_spec(subtests):
    for radius, angle in BITS:
        for dims in (64, 80, 128):
            with subtests.test(radius=radius, angle=angle, dims=dims):
                x = keys(dims)
                stored = encoded(x, radius, angle)
                ours = np.array(polar.decode(Polar(radius, angle), stored, dims, PAGE, mx.float32))
                right = spec.decode(spec.encode(paged(x), radius, angle), angle).reshape(x.shape)
                assert (np.abs(ours - right) > 1e-5).mean() < 2e-4


def test_tables_give_what_decoding_gives(subtests):
    for radius, angle in BITS:
        for rows in (1, 3, 9):
            with subtests.test(radius=radius, angle=angle, rows=rows):
                x, form = keys(80), Polar(radius, angle)
                stored = encoded(x, radius, angle)
                q = np.random.default_rng(1).standard_normal((1, 2, rows, 80))
                ours = mx.array(q.astype(np.float32))
                decoded = polar.decode(form, stored, 80, PAGE, mx.float32)
                dots = ours @ decoded.swapaxes(-1, -2)
                for found in (polar.scores_by_tables, polar.scores):
                    off = mx.abs(found(form, ours, stored, 80, PAGE) - dots).max().item()
                    assert off < 2e-6 * mx.abs(dots).max().item()
                held = spec.encode(paged(x), radius, angle)
                tables = spec.scores(q[:, :, None], held, angle)
                np.testing.assert_allclose(
                    tables, q[:, :, None] @ spec.decode(held, angle).swapaxes(-1, -2), atol=1e-10
                )


def test_nothing_becomes_nan(subtests):
    for what in ("zero", "constant", "huge", "negative", "beyond"):
        with subtests.test(what=what):
            x = {
                "zero": np.zeros((1, 1, PAGE, 64)),
                "constant": np.full((1, 1, PAGE, 64), 1.5),
                "huge": keys(heads=1, pages=1) * 4e3,
                "negative": -np.abs(keys(heads=1, pages=1)),
                "beyond": keys(heads=1, pages=1) * 1e25,
            }[what]
            stored = encoded(x, 4, 4)
            y = np.array(polar.decode(Polar(), stored, 64, PAGE, mx.float32))
            assert np.isfinite(y).all()
            assert all(mx.isfinite(stored[name]).all().item() for name in polar.NUMBERS)
            if what in ("zero", "constant"):
                assert np.abs(y - x).max() <= 2e-3 * np.abs(x).max()
            if what in ("huge", "negative"):
                assert ((y - x) ** 2).sum() < 0.03 * (x**2).sum()


def test_what_polar_cannot_store_says_why():
    values = Side(Affine(4))
    assert "pairs of dims" in CacheConfig(Side(Polar()), values, page=64).why_not(65, 64)
    mixed = CacheConfig(Side(Polar(), "srft"), values, page=64)
    assert "pairs of RoPE, which srft mixes" in mixed.why_not(64, 64)
    with pytest.raises(
        UserError, match=r"\[Polar\] unknown angle bits; got 5; choose from 1, 2, 3"
    ):
        Polar(4, 5)
