"""Weights of a traced step: the next step sees what has changed, and a model's code may assign its own."""

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from random_models import tokens
from step_twins import prompted, steps_of, untraced

from mlxkv.patching import steps as steps_file


@pytest.fixture
def going(attached):
    """Twins of a llama whose steps are traced, and the next token."""
    twins, token = prompted(attached())
    token = twins.speak(token, 6)
    assert twins.steps.traced
    return twins, token


def one_array(model) -> None:
    model.layers[1].mlp.up_proj.weight = -model.layers[1].mlp.up_proj.weight


def in_place(model) -> None:
    model.model.norm.weight[:] = 0.25


def other_type(model) -> None:
    model.set_dtype(mx.bfloat16)


def quantized(model) -> None:
    nn.quantize(model.model.layers[0].self_attn, group_size=32, bits=4)


def lora(model) -> None:
    layer = model.layers[0].self_attn
    layer.q_proj = LoRALinear.from_base(layer.q_proj, r=4)
    layer.q_proj.lora_b = mx.random.normal(layer.q_proj.lora_b.shape, key=mx.random.key(3))


class Turned(nn.Linear):
    def __call__(self, x):
        return x @ self.turned


def renamed(model) -> None:
    """One array goes and another comes: as many as before, under other names."""
    linear = model.layers[0].mlp.down_proj
    linear.turned = -linear.weight.T
    del linear["weight"]
    linear.__class__ = Turned


CHANGES = [one_array, in_place, other_type, quantized, lora, renamed]


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_step_sees_changed_weights(going, change):
    twins, token = going
    kept = copy.deepcopy(twins.plain)
    before = untraced(twins.model, token[None], kept)
    change(twins.model)
    kept = copy.deepcopy(twins.plain)
    assert mx.abs(untraced(twins.model, token[None], kept) - before).max() > 1e-3
    twins.near = 0.3 if change is other_type else 2e-4
    token = twins.read(token)
    traced = twins.steps.traced
    twins.near = 100.0 if change is other_type else twins.near  # half precision wanders apart
    if change is not other_type:
        twins.speak(token, 20)
        twins.compare()
    assert not twins.steps.refused and twins.steps.traced >= traced


def test_old_weights_are_not_kept(going):
    """What a trace took for its inputs is free once the model holds others."""
    twins, token = going
    model = twins.model
    size = sum(x.nbytes for _, x in nn.utils.tree_flatten(model.parameters()))
    model.update(tree_map(lambda x: mx.zeros_like(x), model.parameters()))
    twins.speak(token, 2)
    mx.clear_cache()
    held = mx.get_active_memory()
    model.update(tree_map(lambda x: mx.ones_like(x), model.parameters()))
    mx.eval(model.parameters())
    twins.speak(token, 2)
    mx.clear_cache()
    assert mx.get_active_memory() < held + size / 2


# -- a model's code that assigns


def call_of(model, change) -> None:
    """Have `change(norm)` run in every call of the last norm of `model`."""
    norm = model.model.norm
    inner = type(norm)

    class Norm(inner):
        def __call__(self, x):
            change(self)
            return super().__call__(x)

    norm.__class__ = Norm


def test_weights_that_change_in_every_call_are_refused(attached):
    model = attached()
    call_of(model, lambda norm: setattr(norm, "weight", norm.weight * 0.999))
    cache = make_prompt_cache(model)
    model(tokens(60)[None], cache=cache)
    before = model.model.norm.weight
    for i in range(1, 4):
        mx.eval(model(tokens(1)[None], cache=cache))
        assert mx.allclose(model.model.norm.weight, before * 0.999**i)
    assert list(steps_of(model).refused.values()) == [
        "the model's code changes its weights as it runs"
    ]


def test_what_a_model_makes_once_stays(attached):
    """Such as plamo3's scales, an attribute that was None: a trace that comes first leaves it None."""
    model = attached()
    caches = make_prompt_cache(model)
    model(tokens(60)[None], cache=caches)
    norm = model.model.norm
    norm.made, seen = None, []

    def make(norm):
        seen.append(norm.made)
        if norm.made is None:
            norm.made = norm.weight + 1

    call_of(model, make)
    for _ in range(3):
        mx.eval(model(tokens(1)[None], cache=caches), norm.made)
        assert mx.array_equal(norm.made, norm.weight + 1)
    assert seen[:2] == [None, None] and all(
        x is not None for x in seen[2:]
    )  # a trace, a step as it is
    assert steps_of(model).traced and not steps_of(model).refused


ASKS = [
    (lambda offset: range(offset), "looks at numbers that only the device has"),
    (lambda offset: mx.arange(offset, offset + 1), "fails in a trace: TypeError"),
]


@pytest.mark.parametrize(("ask", "why"), ASKS)
def test_a_model_whose_code_raises_in_a_trace_is_left_with_its_weights(attached, ask, why):
    """As code does that takes the offset for an integer."""
    model = attached()
    layer = model.layers[1].self_attn

    class Asking(type(layer)):
        def __call__(self, x, mask=None, cache=None):
            ask(cache.offset)
            return super().__call__(x, mask, cache)

    layer.__class__ = Asking
    caches = make_prompt_cache(model)
    model(tokens(60)[None], cache=caches)
    before = dict(nn.utils.tree_flatten(model.parameters()))
    for _ in range(3):
        mx.eval(model(tokens(1)[None], cache=caches))
    after = dict(nn.utils.tree_flatten(model.parameters()))
    assert after.keys() == before.keys() and all(after[name] is x for name, x in before.items())
    (reason,) = steps_of(model).refused.values()
    assert reason.startswith(f"the model's code {why}")
    assert [cache.offset for cache in caches] == [63, 63]


def test_a_fault_of_the_caller_is_raised_and_refuses_nothing(going):
    """A batch of two on caches of one: as without traces."""
    twins, token = going
    two = mx.concatenate([token[None], token[None]])
    for _ in range(2):
        with pytest.raises(Exception) as ours:
            twins.model(two, cache=twins.traced)
        with pytest.raises(Exception) as plain:
            untraced(twins.model, two, twins.plain)
        assert type(ours.value) is type(plain.value) and str(ours.value) == str(plain.value)
    twins.speak(token, 20)
    twins.compare()
    assert not twins.steps.refused


def test_many_capacities_are_not_all_kept(attached, monkeypatch):
    monkeypatch.setattr(steps_file, "MOST_TRACES", 2)
    twins, token = prompted(attached(), 30)
    for _ in range(6):
        token = twins.speak(token, 2)
        token = twins.read(tokens(130))  # several pages, and another capacity
    twins.compare()
    assert twins.steps.traced > 4
    assert all(kind.traces <= 2 for kind in twins.steps._kinds.values())
