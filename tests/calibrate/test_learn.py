"""Learned transforms: what Adam gains on planted data, and faults."""

import mlx.core as mx
import numpy as np
import pytest
from random_models import random_model

from mlxkv.calibration import learn, measure, moments
from mlxkv.codec import transform
from mlxkv.codec.transform import Transform
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.calibration.learned import BASES, VARIANTS, Learned

TOKENS = np.random.default_rng(0).integers(0, 64, 600).tolist()
ALL = [(variant, BASES[i % len(BASES)]) for i, variant in enumerate(VARIANTS)]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def planted(heads=2, rows=1024, dims=64, spread=2.0, seed=0):
    """Channels of very different size [G, N, D], another order in each kv head."""
    sizes = np.exp(spread * normal(heads, 1, dims, seed=seed + 1))
    return mx.array((normal(heads, rows, dims, seed=seed) * sizes).astype(np.float32))


# --------------------------------------------------------------------------------------------------
# Learning.


def test_learning_lowers_the_error_of_the_codes(subtests):
    for variant, base in ALL:
        with subtests.test(variant=variant, base=base):
            x, learned = planted(rows=256, spread=1.0), Learned(variant, base, 3, 32, 25)
            down = learn.train(x, learned, "")
            assert down.dtype == np.float32
            own = mx.eye(64) if base == "none" else transform.make("srft", 64, 0).down
            pairs = [
                Transform(own, own.T),
                Transform(mx.array(down), mx.array(np.linalg.inv(down))),
            ]
            before, after = (learn.error(x, learned.quantizer, pair) for pair in pairs)
            assert after < 0.95 * before
    assert (down == learn.train(x, learned, "")).all()


def test_the_error_of_a_result_is_of_rows_that_were_not_learned(monkeypatch):
    model, samples = random_model("llama"), {}
    calibration = measure.calibrate(model, TOKENS, samples=samples)
    learned, seen = Learned(steps=1), []
    monkeypatch.setattr(learn, "error", lambda x, *_: seen.append(x) or 1.0)
    made, _ = learn.learn(calibration, samples, learned)
    rows = samples["0"].rows("keys")
    assert seen[0].shape == seen[1].shape == (2, rows.shape[1] // learn.HELD, 64)
    assert mx.array_equal(seen[0], rows[:, made.learned.rows :])


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
