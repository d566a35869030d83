"""A GPU computes the layers of a prompt as Python builds the next ones: what is computed is the same."""

from contextlib import contextmanager

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model, tokens
from step_twins import same_caches, small

from mlxkv.cache import compressed
from mlxkv.loading.attach import attach, detach
from mlxkv.metal import launch


@pytest.fixture
def started(monkeypatch):
    """As on a GPU; the numbers of arrays that were handed over before they were asked for."""
    found, real = [], mx.async_eval
    monkeypatch.setattr(compressed, "device_type", lambda: "metal")

    def watched(*arrays):
        if isinstance(arrays[0], list):  # mlx-lm's loop hands over arrays one by one
            found.append(len(arrays[0]))
        real(*arrays)

    monkeypatch.setattr(launch.mx, "async_eval", watched)
    return found


@pytest.fixture
def as_on_a_cpu(monkeypatch):
    """Inside, a prompt is computed only when its output is evaluated."""

    @contextmanager
    def change():
        with monkeypatch.context() as inside:
            inside.setattr(compressed, "device_type", lambda: "cpu")
            yield

    return change


@pytest.fixture
def model():
    made = random_model("llama", num_hidden_layers=3)
    yield made
    detach(made)


@pytest.mark.parametrize("lengths", [(60,), (20, 9, 40), (5, 8, 30)], ids=str)
def test_prompts_are_read_the_same(model, started, as_on_a_cpu, lengths):
    attach(model, small())
    ahead, behind = make_prompt_cache(model), make_prompt_cache(model)
    for n in lengths:
        ours = model(tokens(n)[None], cache=ahead)
        assert len(started) == (3 if n > 8 else 0)
        with as_on_a_cpu():
            plain = model(tokens(n)[None], cache=behind)
        assert mx.array_equal(ours, plain) and len(started) == (3 if n > 8 else 0)
        started.clear()
    for one, other in zip(ahead, behind, strict=True):
        same_caches(one, other, 0)


def test_a_cpu_gains_nothing(model, started, monkeypatch):
    monkeypatch.setattr(compressed, "device_type", lambda: "cpu")
    attach(model, small())
    model(tokens(60)[None], cache=make_prompt_cache(model))
    assert not started


def test_few_layers_are_under_way(model, started, monkeypatch):
    """The host waits for a number of the layer before the last, which keeps no other memory."""
    waited, real = [], mx.eval
    monkeypatch.setattr(launch, "_local", launch.threading.local())
    monkeypatch.setattr(launch.mx, "eval", lambda *arrays: (waited.append(arrays), real(*arrays)))
    attach(model, small())
    caches = make_prompt_cache(model)
    model(tokens(60)[None], cache=caches)
    assert len(started) == 3 and len(waited) == 1 and waited[0][0].size == 1
    model(tokens(60)[None], cache=caches)
    assert len(started) == 6 and len(waited) == 4
