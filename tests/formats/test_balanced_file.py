"""Balanced transforms in a calibration file: round trips, faults, files of format 1."""

import json

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from older_file import older
from random_models import random_model
from safetensors import safe_open
from safetensors.numpy import save

from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.models import attach, detach
from mlxkv.models.calibration import measure

TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def made(model):
    return measure.calibrate(model, TEXT)


def rewritten(path, header=None, drop=(), **tensors):
    with safe_open(path, "numpy") as file:
        old = json.loads(file.metadata()["mlxkv"])
        found = {n: file.get_tensor(n) for n in file.keys() if n not in drop}  # noqa: SIM118
    path.write_bytes(save(found | tensors, {"mlxkv": json.dumps({**old, **(header or {})})}))


@pytest.fixture
def path(made, tmp_path):
    artifact.write(tmp_path / "a.safetensors", made)
    return tmp_path / "a.safetensors"


def test_it_comes_back_the_same(made, path):
    back = artifact.read(path)
    assert back.balanced and back.digest == made.digest
    for name, layer in made.layers.items():
        for side in artifact.SIDES:
            ours, theirs = (getattr(x, side).balance for x in (layer, back.layers[name]))
            assert (ours.down == theirs.down).all() and (ours.sigma == theirs.sigma).all()
            assert ours.floored == theirs.floored
            for a, b in zip(ours.pair("uhp"), theirs.pair("uhp"), strict=True):
                np.testing.assert_array_equal(a, b)
            down, up = (x.astype(np.float64) for x in theirs.pair("uhp"))
            assert np.abs(down @ up - np.eye(64)).max() < 1e-5


def test_every_fault_is_one_line(made, path):
    whole, sound = path.read_bytes(), made.layers["1"].values.balance
    nan, flat, shear = sound.down.copy(), sound.down.copy(), sound.down.copy()
    nan[0, 3, 3] = np.nan
    flat[1, :, 7] = flat[1, :, 8]
    shear[0, :, 0] *= 1 + 1e-3
    for changes, reason in (
        ({"1.values.down": nan}, "NaN, infinity .* in layer 1, values"),
        ({"1.values.down": flat}, "not invertible in layer 1, values: a condition of"),
        ({"1.values.down": sound.down[:, :32]}, "parts missing"),
        ({"1.values.down": sound.down.astype(np.float16)}, "no float32"),
        ({"1.values.down": shear}, "its digest differs"),
        ({"1.values.sigma": -sound.sigma}, "sigmas that are not positive"),
        ({"drop": ["1.values.down"]}, "parts missing"),
    ):
        path.write_bytes(whole)
        rewritten(path, **changes)
        with pytest.raises(UserError, match=reason) as caught:
            artifact.read(path)
        line = str(caught.value)
        assert line.startswith(f"[calibration] {path}") and "\n" not in line


def test_files_of_format_1_serve_rotations(model, made, tmp_path):
    path = tmp_path / "old.safetensors"
    artifact.write(path, older(made))
    rewritten(path, {"format": 1})
    back = artifact.read(path)
    assert not back.balanced
    attach(model, "oscar-int2", calibration=path)
    with pytest.raises(UserError, match=r"\[calibration\] .*old.*holds no balanced .* mlxkv calib"):
        attach(model, "int4/balanced-int2", calibration=path)
    assert make_prompt_cache(model)[0].config.keys.transform == "oscar"  # the model is unchanged
    detach(model)
