"""Traced steps where models are used: mlx-lm's generators, switches, threads, copies, and taking them away."""

import copy
import inspect
import pickle
import threading

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from random_models import random_model, tokens
from step_twins import prompted, small, steps_of, untraced

from mlxkv.loading.attach import attach, detach
from mlxkv.patching.steps import SWITCH


def spoken(model, off: str | None = None, count: int = 24, **options) -> list[tuple[int, mx.array]]:
    """Tokens and log probabilities that mlx-lm's generator yields, with steps or without."""
    steps = steps_of(model)
    before, steps.off = steps.off, off
    mx.random.seed(7)
    try:
        return [
            (int(token), logprobs)
            for token, logprobs in generate_step(tokens(50), model, max_tokens=count, **options)
        ]
    finally:
        steps.off = before


OPTIONS = {
    "greedy": {},
    "sampled": {"sampler": make_sampler(temp=0.8, top_p=0.9)},
    "penalties": {
        "logits_processors": make_logits_processors(
            {3: 1.5}, repetition_penalty=1.3, repetition_context_size=8
        )
    },
}


@pytest.mark.parametrize("how", OPTIONS)
def test_mlx_lm_generates_the_same(attached, how):
    model = attached()
    ours = spoken(model, **OPTIONS[how])
    assert steps_of(model).traced and not steps_of(model).refused
    plain = spoken(model, "a test", **OPTIONS[how])
    assert [token for token, _ in ours] == [token for token, _ in plain]
    assert all(mx.abs(a[1] - b[1]).max() < 1e-4 for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(("count", "draft_seed"), [(7, 0), (2, 1)])  # right, mostly wrong
def test_a_draft_is_verified_by_traced_steps(attached, count, draft_seed):
    """Tokens are those of a run without traces, drafted or not."""
    model, draft = attached(), random_model("llama", draft_seed)

    def speculated(off: str | None) -> list[int]:
        steps_of(model).off = off
        found = speculative_generate_step(
            tokens(50), model, draft, num_draft_tokens=count, max_tokens=30
        )
        return [(int(token), bool(drafted)) for token, _, drafted in found]

    ours = speculated(None)
    assert steps_of(model).traced and not steps_of(model).refused
    assert ours == speculated("a test")


# -- switches


def test_the_switch(attached, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    model = attached()
    assert steps_of(model).off == "MLXKV_COMPILE=0"
    twins, token = prompted(model)
    twins.speak(token, 3)
    assert not steps_of(model).traced
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert steps_of(other).off == "MLXKV_COMPILE=0"
        detach(other)
    monkeypatch.setenv(SWITCH, "1")
    attach(model, small())
    twins, token = prompted(model)
    twins.speak(token, 3)
    assert steps_of(model).traced


def test_detach_gives_the_class_its_own_call_back(unbound):
    before, signature = llama.Model.__call__, inspect.signature(llama.Model.__call__)
    models = [random_model("llama", seed) for seed in (0, 1)]
    for model in models:
        attach(model, small())
    assert llama.Model.__call__ is not before
    assert inspect.signature(llama.Model.__call__) == signature
    detach(models[0])
    assert llama.Model.__call__ is not before
    detach(models[1])
    assert llama.Model.__call__ is before


def test_only_decode_steps_of_caches_are_traced(attached, monkeypatch):
    """Other calls go to the model's own code as they are."""
    model = attached()
    steps, caches = steps_of(model), make_prompt_cache(model)
    model(tokens(60)[None], cache=caches)
    for call in (
        lambda: model(tokens(5)[None]),
        lambda: model(tokens(5)[None], None),
        lambda: model(tokens(9)[None], cache=caches),
        lambda: model(tokens(1)[None], caches, None),
        lambda: model(tokens(1)[None], cache=caches, input_embeddings=mx.zeros((1, 1, 32))),
    ):
        mx.eval(call())
        assert not steps.traced and not steps.refused
    mx.eval(model(tokens(1)[None], caches))
    assert steps.traced == 1


def test_copies_have_traces_of_their_own(attached):
    model = attached()
    twins, token = prompted(model)
    token = twins.speak(token, 3)
    other = pickle.loads(pickle.dumps(model))
    assert steps_of(other) is not steps_of(model) and not steps_of(other).traced
    other.model.norm.weight = -other.model.norm.weight
    for one in (other, model, other):
        ours, plain = copy.deepcopy(twins.traced), copy.deepcopy(twins.traced)
        found = one(token[None], cache=ours)
        assert mx.abs(found - untraced(one, token[None], plain)).max() < 1e-4
    assert steps_of(other).traced
    detach(other)
    twins.speak(token, 3)


# -- threads and streams


def test_one_thread_then_another(attached):
    """A trace belongs to the stream of its thread."""
    model = attached()
    twins, token = prompted(model)
    token = twins.speak(token, 3)
    faults = []

    def go_on() -> None:
        nonlocal token
        try:
            token = twins.speak(token, 5)
            twins.compare()
            mx.eval(token)
        except BaseException as error:
            faults.append(error)

    for _ in range(3):
        mx.eval([cache.arrays() for cache in (*twins.traced, *twins.plain)])
        thread = threading.Thread(target=go_on)
        thread.start()
        thread.join()
        assert not faults
    go_on()
    assert not faults and not twins.steps.refused
