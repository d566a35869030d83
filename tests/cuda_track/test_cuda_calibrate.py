"""Calibration and evaluation by torch, beside MLX."""

import json

import numpy as np
import pytest
import torch

from cuda_track import calibrate, eval
from cuda_track.models import seam
from cuda_track.models.loader import load
from mlxkv import models
from mlxkv.errors import UserError
from mlxkv.formats.calibration import artifact
from mlxkv.formats.calibration.artifact import SIDES
from mlxkv.models.calibration import measure as mlx_calibrate
from mlxkv.texts import corpus

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loaded():
    return load("tiny", "fp16", "float32")


@pytest.fixture(scope="module")
def tokens(loaded):
    text = "\n\n".join(corpus.interleaved("calibration")[:12])
    return loaded.tokenizer(text, add_special_tokens=False)["input_ids"][:640]


@pytest.fixture(scope="module")
def made(loaded, tokens):
    return calibrate.calibrate(loaded, tokens, "a text", bos=1)


def test_moments_are_those_of_mlx(made, tokens):
    theirs = models.load("tiny", "fp16", dtype="float32")
    right = mlx_calibrate.calibrate(theirs.model, tokens, text="a text", bos=1)
    assert set(made.layers) == set(right.layers)
    assert made.fingerprint == right.fingerprint
    assert made.text_digest == right.text_digest
    for name, layer in right.layers.items():
        for side in SIDES:
            ours, exact = getattr(made.layers[name], side), getattr(layer, side)
            assert np.allclose(ours.values, exact.values, rtol=1e-3)
            assert np.allclose(ours.balance.sigma, exact.balance.sigma, rtol=1e-2)
            assert np.allclose(ours.peaks, exact.peaks, rtol=1e-3)
            # Directions of like eigenvalues may turn among themselves; what they span may not.
            means = (
                b.vectors * b.values[:, None] @ b.vectors.swapaxes(-1, -2) for b in (ours, exact)
            )
            first, second = means
            assert np.abs(first - second).max() < 1e-4 * np.abs(second).max()


def test_a_file_is_read_by_both(made, loaded, tmp_path):
    path = tmp_path / "made.safetensors"
    artifact.write(path, made)
    back = artifact.read(path)
    assert back.digest == made.digest
    reports = seam.attach(loaded.model, "balanced-int2", path)
    assert [r.compressed for r in reports] == [False, True] * 4
    assert models.load("tiny", "oscar-int2", calibration=path).layers[1].compressed
    seam.attach(loaded.model, "fp16")


def test_too_little_text_is_refused(loaded):
    with pytest.raises(UserError, match="too little text"):
        calibrate.calibrate(loaded, [5] * 100)


def test_fewer_bits_lose_more(loaded, tokens):
    found = eval.evaluate(loaded, ["fp16", "int8", "naive-int2"], tokens[:420], 12)
    seam.attach(loaded.model, "fp16")
    kl = {name: row["kl_mean"] for name, row in found.items()}
    assert kl["fp16"] == 0
    assert 0 < kl["int8"] < 1e-4 < kl["naive-int2"]
    assert found["fp16"]["bits_per_value"] == 16 and found["int8"]["bits_per_value"] == 8.5
    json.dumps(found)
