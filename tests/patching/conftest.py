"""Models that are attached in a test, and detached behind it."""

import pytest
from random_models import random_model
from step_twins import small

from mlxkv.loading.attach import attach, detach


@pytest.fixture
def attached():
    """Makes an attached model: (family, config of pages, its maker, changes to the model's config)."""
    models = []

    def make(family: str = "llama", config=None, made=random_model, **changes):
        models.append(made(family, **changes))
        attach(models[-1], config or small())
        return models[-1]

    yield make
    for model in models:
        detach(model)
