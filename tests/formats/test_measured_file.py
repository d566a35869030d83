"""A measured calibration on disk: balanced maps, means of keys, peaks of channels, and faults."""

import numpy as np
import pytest
from calibration_inputs import rewritten
from random_models import random_model

from mlxkv.calibration import measure
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact

TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def made(model):
    return measure.calibrate(model, TEXT)


@pytest.fixture
def path(made, tmp_path):
    artifact.write_calibration(tmp_path / "a.safetensors", made)
    return tmp_path / "a.safetensors"


def test_it_comes_back_the_same(made, path):
    back = artifact.read_calibration(path)
    assert back.digest == made.digest
    for name, layer in made.layers.items():
        np.testing.assert_array_equal(back.layers[name].keys.mean, layer.keys.mean)
        for side in artifact.SIDES:
            ours, theirs = (getattr(x, side) for x in (layer, back.layers[name]))
            np.testing.assert_array_equal(ours.peaks, theirs.peaks)
            ours, theirs = ours.balance, theirs.balance
            assert (ours.down == theirs.down).all() and (ours.sigma == theirs.sigma).all()
            assert ours.floored == theirs.floored
            for a, b in zip(ours.mixed(), theirs.mixed(), strict=True):
                np.testing.assert_array_equal(a, b)
            down, up = (x.astype(np.float64) for x in theirs.mixed())
            assert np.abs(down @ up - np.eye(64)).max() < 1e-5


def put(x, value, at):
    x = x.copy()
    x[at] = value
    return x


def test_every_fault_is_one_line(made, path, subtests):
    whole, values, mean = path.read_bytes(), made.layers["1"].values, made.layers["1"].keys.mean
    sound, peaks = values.balance, values.peaks
    flat = put(sound.down, sound.down[1, :, 8], (1, slice(None), 7))
    shear = put(sound.down, sound.down[0, :, 0] * (1 + 1e-3), (0, slice(None), 0))
    vectors, eigenvalues = (getattr(made.layers["1"].keys, n) for n in ("vectors", "values"))
    for name, tensor, reason in (
        ("keys.values", put(eigenvalues, np.nan, (0, 3)), "NaN, infinity .* in layer 1, keys"),
        ("keys.values", -eigenvalues, "eigenvalues that are not positive"),
        ("keys.vectors", put(vectors, np.inf, (0, 3)), "NaN, infinity .* in layer 1, keys"),
        ("keys.vectors", vectors[:, :32], "parts missing"),
        ("keys.vectors", vectors * np.float32(1 + 4e-5), "its digest differs"),
        (
            "keys.vectors",
            vectors * np.float32(1 + 1e-4),
            "is not orthonormal in layer 1, keys: off by",
        ),
        ("values.down", put(sound.down, np.nan, (0, 3, 3)), "NaN, infinity .* in layer 1, values"),
        ("values.down", flat, "not invertible in layer 1, values: a condition of"),
        ("values.down", sound.down[:, :32], "parts missing"),
        ("values.down", sound.down.astype(np.float16), "no float32"),
        ("values.down", shear, "its digest differs"),
        ("values.down", None, "parts missing"),
        ("values.sigma", -sound.sigma, "sigmas that are not positive"),
        ("values.peaks", put(peaks, np.nan, (0, 3)), "NaN, infinity .* in layer 1, values"),
        ("values.peaks", put(peaks, 0, (1, 7)), "peaks that are not positive in layer 1, values"),
        ("values.peaks", peaks[:, :32].copy(), "parts missing"),
        ("values.peaks", peaks * np.float32(1.001), "its digest differs"),
        ("values.peaks", None, "parts missing"),
        ("keys.mean", put(mean, np.nan, (0, 3)), "NaN, infinity .* in layer 1, keys"),
        ("keys.mean", mean[:1].copy(), "parts missing"),
        ("keys.mean", mean.astype(np.float64), "NaN, infinity or no float32"),
        ("keys.mean", mean + np.float32(0.1), "its digest differs"),
        ("keys.mean", None, "parts missing"),
    ):
        with subtests.test(name=name, reason=reason):
            path.write_bytes(whole)
            if tensor is None:
                rewritten(path, drop=[f"1.{name}"])
            else:
                rewritten(path, **{f"1.{name}": tensor})
            with pytest.raises(UserError, match=reason) as caught:
                artifact.read_calibration(path)
            line = str(caught.value)
            assert line.startswith(f"[calibration] {path}") and "\n" not in line
