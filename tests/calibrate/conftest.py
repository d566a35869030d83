"""A random llama and its calibration, shared by the tests of this room that change neither."""

import mlx.core as mx
import pytest
from calibration_inputs import TEXT
from random_models import random_model

from mlxkv.calibration import measure
from mlxkv.loading.attach import detach


@pytest.fixture(scope="package")
def model():
    return random_model("llama")


@pytest.fixture(scope="package")
def made(model):
    return measure.calibrate(model, TEXT)


@pytest.fixture(scope="package")
def leaning():
    """Its keys have an offset of several standard deviations, which RoPE transforms where it is fast."""
    model = random_model("llama", attention_bias=True)
    for layer in model.layers:
        projection = layer.self_attn.k_proj
        projection.bias = 3 * mx.abs(projection.bias) + 0.75
    return model


@pytest.fixture(scope="package")
def leaning_made(leaning):
    return measure.calibrate(leaning, TEXT, positions=len(TEXT))


@pytest.fixture
def detached(leaning):
    yield
    detach(leaning)
