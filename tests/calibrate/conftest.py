"""A random llama and its calibration, shared by the tests of this room that change neither."""

import pytest
from random_models import random_model
from turning import TEXT

from mlxkv.models.calibration import measure


@pytest.fixture(scope="package")
def model():
    return random_model("llama")


@pytest.fixture(scope="package")
def made(model):
    return measure.calibrate(model, TEXT)
