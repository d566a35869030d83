"""Learned transforms: their maps against the spec, what Adam gains on planted data, and faults."""

import mlx.core as mx
import numpy as np
import pytest
from random_models import random_model

from mlxkv.codec import transform
from mlxkv.codec.transform import Transform
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.calibration.learned import BASES, VARIANTS, Learned
from mlxkv.formats.config import Affine
from mlxkv.models.calibration import learn, measure, moments, parametrization
from mlxkv.spec import affine as ref

TOKENS = np.random.default_rng(0).integers(0, 64, 600).tolist()
ALL = [(variant, BASES[i % len(BASES)]) for i, variant in enumerate(VARIANTS)]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def noisy(params, seed=0):
    """Parameters as they are after some learning."""
    return {name: x + 0.1 * mx.array(normal(*x.shape, seed=seed)) for name, x in params.items()}


def base_of(name, dims):
    return mx.eye(dims) if name == "none" else transform.make("srft", dims, 0).down


def planted(heads=2, rows=1024, dims=64, spread=2.0, seed=0):
    """Channels of very different size [G, N, D], another order in each kv head."""
    sizes = np.exp(spread * normal(heads, 1, dims, seed=seed + 1))
    return mx.array((normal(heads, rows, dims, seed=seed) * sizes).astype(np.float32))


# --------------------------------------------------------------------------------------------------
# The maps.


def test_maps_start_at_the_base_and_stay_invertible(subtests):
    for variant, base in ALL:
        for dims in (18, 80):
            with subtests.test(variant=variant, base=base, dims=dims):
                matrix = base_of(base, dims)
                params = parametrization.start(Learned(variant), 2, dims)
                down, up = (np.array(x, np.float64) for x in parametrization.pair(params, matrix))
                np.testing.assert_allclose(down, np.broadcast_to(matrix, down.shape), atol=2e-6)
                down, up = (
                    np.array(x, np.float64) for x in parametrization.pair(noisy(params), matrix)
                )
                assert down.shape == (2, dims, dims)
                assert np.abs(down - np.array(matrix)).max() > 1e-2
                np.testing.assert_allclose(
                    down @ up, np.broadcast_to(np.eye(dims), down.shape), atol=3e-5
                )
                gram = down.swapaxes(-1, -2) @ down  # orthogonal up to the scale of each column
                off = gram - gram * np.eye(dims)
                assert np.abs(off).max() < 3e-5
                if not Learned(variant).scaled:
                    np.testing.assert_allclose(np.linalg.norm(down, axis=-2), 1, atol=3e-5)
                else:
                    log = np.log(np.linalg.norm(down, axis=-2))
                    np.testing.assert_allclose(
                        log.mean(-1), 0, atol=1e-5
                    )  # codes do not see a common factor


def test_what_is_learned_from_is_what_a_cache_gives_back(subtests):
    """Straight-through codes are the product's own, but for float16 scales; 80 dims: a short group."""
    for group in (16, 32, 64, 0):
        with subtests.test(group=group):
            x, codes = planted(dims=80), Affine(4, group)
            decoded = np.array(learn.coded(x, codes), np.float64)
            size = codes.group_size(80, 16)
            stored = ref.affine_encode(np.array(x, np.float64)[None], 4, size, False, "token")
            wanted = ref.affine_decode(*stored, size, "token")[0]
            lost, expected = (((one - np.array(x)) ** 2).sum() for one in (decoded, wanted))
            assert lost == pytest.approx(expected, rel=0.03)
            near = np.abs(decoded - wanted) <= 2e-3 * np.abs(wanted) + 1e-3 * np.abs(x).max()
            assert near.mean() > 0.99  # but where float16 of a scale moves a code


# --------------------------------------------------------------------------------------------------
# Learning.


def test_learning_lowers_the_error_of_the_codes(subtests):
    for variant, base in ALL:
        with subtests.test(variant=variant, base=base):
            x, learned = planted(rows=512, spread=1.0), Learned(variant, base, 3, 32, 40)
            down = learn.train(x, learned, "")
            again = learn.train(x, learned, "")
            assert (down == again).all() and down.dtype == np.float32
            own = base_of(base, 64)
            pairs = [
                Transform(own, own.T),
                Transform(mx.array(down), mx.array(np.linalg.inv(down))),
            ]
            before, after = (learn.error(x, learned.spec, pair) for pair in pairs)
            assert after < 0.95 * before


def test_nan_is_one_line():
    x = planted(rows=64)
    x[0, 3, 5] = float("nan")
    with pytest.raises(MachineError, match=r"\[learn\] NaN or infinity in layer 3, keys; try") as e:
        learn.train(x, Learned(steps=2), "3, keys")
    assert "\n" not in str(e.value)


def test_unknown_settings_are_one_line(subtests):
    for changes, message in (
        ({"variant": "cayley"}, r"\[--learn\] unknown; got 'cayley'; choose from scale, rotation,"),
        ({"base": "hadamard"}, r"\[--base\] unknown; got 'hadamard'; choose from srft, none"),
        ({"bits": 5}, r"\[--bits\] unknown; got 5; choose from 2, 3, 4"),
        ({"group": 8}, r"group must be 0 or at least 16; got 8"),
        ({"steps": 0}, r"\[--steps\] must be at least 1; got 0"),
    ):
        with subtests.test(changes=changes, message=message):
            with pytest.raises(UserError, match=message):
                Learned(**changes).check()


# --------------------------------------------------------------------------------------------------
# The sample.


def test_a_sample_is_evenly_spaced_and_skips_the_sink(monkeypatch):
    monkeypatch.setattr(measure, "ROWS", 200)
    model, whole = random_model("llama"), {}
    thin, parts = {}, (600, 64)
    measure.calibrate(model, TOKENS, samples=thin)
    monkeypatch.setattr(measure, "ROWS", 4096)
    measure.calibrate(model, TOKENS, samples=whole)
    monkeypatch.setattr(measure, "CHUNK", parts[1])
    cut = {}
    measure.calibrate(model, TOKENS, samples=cut)
    for name, one in whole.items():
        for side in ("keys", "values"):
            rows = one.rows(side)
            assert rows.shape == (2, parts[0] - moments.SINK, 64)
            assert mx.array_equal(thin[name].rows(side), rows[:, ::3])
            assert mx.allclose(cut[name].rows(side), rows, atol=1e-4)
