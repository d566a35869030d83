"""What a trace cannot hold, and changes that it has to see: each made wrong tokens once."""

import sys
import threading

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from random_models import random_model, tokens
from step_twins import NEAR, prompted, small, steps_of, untraced

from mlxkv.loading.attach import attach, detach


def batch_of(model, lengths=(60, 65)) -> list:
    """Caches of a batch of prompts."""
    rows = []
    for i, length in enumerate(lengths):
        rows.append(make_prompt_cache(model))
        model(tokens(length, seed=i + 1)[None], cache=rows[-1])
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]


def apart(model, text: mx.array, traced: list, plain: list) -> float:
    """How far the logits of a traced step are from those of one that Python builds."""
    return mx.abs(model(text, cache=traced) - untraced(model, text, plain)).max().item()


def test_layers_that_share_a_cache_wait_in_a_batch_that_quantizes(attached):
    model, text = attached("gemma3n"), mx.array([[3], [4]])
    traced, plain = batch_of(model), batch_of(model)
    assert max(apart(model, text, traced, plain) for _ in range(12)) < NEAR
    assert steps_of(model).replayed > 4


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_offsets_that_mlx_lm_changes_in_place_are_read_again(attached, family):
    """As mlx-lm 0.31 does in every step: the array is the same object, with other indices in it."""
    model, text = attached(family), mx.array([[3], [4]])
    traced, plain = batch_of(model), batch_of(model)
    for _ in range(4):
        apart(model, text, traced, plain)
    held = {id(cache): cache.offset for cache in traced if hasattr(cache, "rotated")}
    more = tokens(9, seed=9)[None].astype(text.dtype)
    more = mx.concatenate([more, more])
    assert apart(model, more, traced, plain) < NEAR  # built by Python: too many for a step
    for cache in traced:
        if id(cache) in held:
            now, same = cache.offset, held[id(cache)]
            same += now - same
            cache.offset = same
    assert all(cache.offset is held[id(cache)] for cache in traced if id(cache) in held)
    assert max(apart(model, text, traced, plain) for _ in range(4)) < NEAR


def test_the_scale_of_an_adapter_is_seen(attached):
    model = attached()
    linear = LoRALinear.from_base(model.layers[0].self_attn.q_proj)
    linear.lora_b = mx.ones_like(linear.lora_b)
    model.layers[0].self_attn.q_proj = linear
    twins, token = prompted(model)
    token = twins.speak(token, 4)
    linear.scale = 0.0
    twins.speak(token, 4)
    assert steps_of(model).replayed == 8


def test_random_numbers_are_drawn_in_every_step(attached):
    model = attached()
    kind = type(model.layers[0].mlp)

    class Noisy(kind):
        def __call__(self, x):
            return super().__call__(x) * mx.random.uniform(shape=x.shape)

    model.layers[0].mlp.__class__ = Noisy
    caches = make_prompt_cache(model)
    model(tokens(60)[None], cache=caches)
    for _ in range(3):
        mx.eval(model(mx.array([[3]]), cache=caches))
    assert "random" in next(iter(steps_of(model).refused.values()))


def test_a_thread_does_not_see_the_placeholders_of_another_ones_trace():
    model, errors, done = random_model("llama"), [], threading.Event()
    attach(model, small())
    before = sys.getswitchinterval()

    def prompts() -> None:
        while not done.is_set():
            try:
                mx.eval(model(tokens(30)[None], cache=make_prompt_cache(model)))
            except Exception as error:
                errors.append(error)

    other = threading.Thread(target=prompts)
    try:
        sys.setswitchinterval(1e-6)
        other.start()
        for length in range(60, 180, 12):  # other capacities: other traces
            caches = make_prompt_cache(model)
            model(tokens(length)[None], cache=caches)
            mx.eval(model(mx.array([[3]]), cache=caches))
    finally:
        done.set()
        other.join()
        sys.setswitchinterval(before)
        detach(model)
    assert not errors
