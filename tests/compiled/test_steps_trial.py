"""The report of `attach` says how decode steps are going to be made; nothing is computed for it."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from random_models import random_model
from stepping import small, steps_of

from mlxkv.models import attach, detach, summarise
from mlxkv.models.compiled.step import SWITCH

OLD = not hasattr(KVCache, "keys_and_values")  # mlx-lm before 0.32
LENGTH = "built by Python: [attend] this model's code reads how many tokens a cache holds"
ASSIGNS = "known from the first tokens on: the model's code changes its weights as it runs"
OTHERS = {"afm7": LENGTH, "gemma3n": LENGTH if OLD else ASSIGNS}


@pytest.fixture
def said():
    """Attaches a model; how its reports say that steps are made, the same in all of them."""
    models = []

    def of(model, config=None) -> str:
        models.append(model)
        (steps,) = {report.steps for report in attach(model, config or small())}
        return steps

    yield of
    for model in models:
        detach(model)


@pytest.mark.parametrize("family", ["llama", "afm7", "gemma3n"])
def test_what_is_said(said, family):
    """test_steps_families.py has what happens, for all families."""
    assert said(random_model(family)) == OTHERS.get(family, "replayed")


def test_caches_that_observe(said):
    expected = "built by Python: no fixed form of AdaptiveKVCache"
    assert said(random_model("llama"), "int4+keep0.5") == expected


def test_nothing_is_computed_and_nothing_changed(said):
    model = random_model("llama", num_hidden_layers=4, hidden_size=256)
    mx.eval(model.parameters())
    weights = [x for _, x in sorted(_flat(model))]
    said(model)  # tables that a process makes once
    detach(model)
    mx.random.seed(3)
    drawn = mx.random.uniform().item()
    mx.random.seed(3)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert said(model) == "replayed"
    assert mx.get_peak_memory() - before < 1 << 14
    assert mx.random.uniform().item() == drawn
    assert all(a is b for a, (_, b) in zip(weights, sorted(_flat(model)), strict=True))
    assert not steps_of(model).traced and steps_of(model).state == "none yet"


def _flat(model):
    return ((name, x) for module in model.modules() for name, x in _arrays(module))


def _arrays(module):
    own = ((name, x) for name, x in module.items() if isinstance(x, mx.array))
    return ((f"{id(module)} {name}", x) for name, x in own)


def test_code_that_fails_in_a_dry_run_is_left_alone(unbound, said, monkeypatch):
    """attach goes on; the reason is in the report."""
    real = llama.Model.__call__

    def short(self, inputs, cache=None, **kwargs):
        if inputs.shape[1] > 8:
            raise ValueError("no long prompts")
        return real(self, inputs, cache=cache, **kwargs)

    monkeypatch.setattr(llama.Model, "__call__", short)
    steps = said(random_model("llama"))
    assert steps == "known from the first tokens on: a dry run fails (ValueError)"


def test_a_class_that_its_module_does_not_name(said):
    class Unnamed(llama.Model):
        def __call__(self, inputs, cache=None):
            return super().__call__(inputs, cache)

    model = random_model("llama")
    model.__class__ = Unnamed
    assert said(model) == "built by Python: the model's class is not found by its name"


def test_the_switch_and_the_line(monkeypatch):
    model = random_model("llama")
    monkeypatch.setenv(SWITCH, "0")
    assert summarise(attach(model, small()))[-1] == "decode steps: built by Python: MLXKV_COMPILE=0"
    monkeypatch.delenv(SWITCH)
    expected = (
        "decode steps: built by Python: on a CPU they begin with a compiler; MLXKV_COMPILE=1 "
        "switches them on"
    )
    if mx.default_device() == mx.Device(mx.cpu):
        assert summarise(attach(model, small()))[-1] == expected
    monkeypatch.setenv(SWITCH, "1")
    assert summarise(attach(model, small()))[-1] == "decode steps: replayed"
    detach(model)
    assert summarise(attach(model, "fp16"))[-1].endswith("as asked for")
