"""Which families are traced, and why others are not; sliding windows, states and lists of caches in a trace."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from random_models import FAMILIES, tokens
from step_twins import prompted, small, steps_of

OLD = not hasattr(KVCache, "keys_and_values")  # mlx-lm before 0.32
LENGTH = "[attend] this model's code reads how many tokens a cache holds"
MASK = "the model's code asks compressed layers for a mask as an array"
NUMBERS = "the model's code looks at numbers that only the device has"
BIGCODE = {"n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_inner": 64}
# Families that are not traced, and why. All others are.
REFUSED = {"afm7": LENGTH, "gpt_bigcode": NUMBERS, "gemma2": MASK}
REFUSED |= {"gemma3n": LENGTH} if OLD else {}
KINDS = {
    "gemma3_text": {"RotatingKVCache", "CompressedKVCache"},
    "gpt_oss": {"RotatingKVCache", "CompressedKVCache"},
    "qwen3_next": {"ArraysCache", "CompressedKVCache"},
    "falcon_h1": {"CacheList"},
}


@pytest.mark.parametrize("family", sorted({*REFUSED, *KINDS, "gemma3n"}))
def test_which_families_are_traced(family, attached, monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpt_bigcode", BIGCODE | {"layer_norm_epsilon": 1e-5})
    model = attached(family)
    if family in KINDS:
        kinds = {type(cache).__name__ for cache in make_prompt_cache(model)}
        assert kinds <= KINDS[family] and kinds & KINDS[family]
    twins, token = prompted(model)
    token = twins.speak(token, 5)
    token = twins.read(mx.concatenate([token, tokens(3)]))
    twins.speak(token, 2)
    twins.compare()
    assert list(steps_of(model).refused.values()) == (
        [REFUSED[family]] if family in REFUSED else []
    )
    assert bool(steps_of(model).traced) == (family not in REFUSED)


# -- sliding windows


def test_a_window_before_it_is_full_as_it_gets_full_and_after(attached):
    """Pages are quantized when the ring still has room, so that all its stages are traced."""
    model = attached("gemma3_text", sliding_window=32)
    twins, token = prompted(model, 14)
    ring = next(cache for cache in twins.traced if type(cache) is RotatingKVCache)
    assert ring.offset < ring.max_size
    stages = set()
    for _ in range(56):
        before = twins.steps.traced
        token = twins.read(token)
        stages |= {ring.offset - ring.max_size} if twins.steps.traced > before else set()
        twins.compare()
    assert ring.offset > 2 * ring.max_size and ring._idx < ring.max_size
    assert (
        min(stages) < 0 <= max(stages) and len(stages) < 8
    )  # a trace before, one of the full ring


@pytest.mark.parametrize("prompt", [14, 33])
def test_several_tokens_at_every_stage_of_a_window(attached, prompt):
    twins, token = prompted(attached("gemma3_text", sliding_window=32), prompt)
    for new in (1, 3, 1, 8, 1, 2, 1, 1, 8, 8, 1):
        token = twins.read(mx.concatenate([token, tokens(new - 1)]) if new > 1 else token)
        twins.compare()
    assert twins.steps.traced and not twins.steps.refused


# -- caches that share indices, or do not


def test_caches_that_are_not_in_step(attached):
    """One layer was taken back alone: its indices are its own."""
    twins, token = prompted(attached("llama", num_hidden_layers=3))
    token = twins.speak(token, 3)
    for caches in (twins.traced, twins.plain):
        caches[1].trim(2)
    twins.speak(token, 40)
    twins.compare()
    assert twins.steps.traced and not twins.steps.refused


def test_layers_that_share_a_cache_read_the_same_where_a_page_is_quantized(attached):
    """gemma3n: the last layers read what others have written, also in the step that quantizes it."""
    twins, token = prompted(attached("gemma3n", config=small(page=16)))
    before = [c.store.count for c in twins.plain if hasattr(c, "store")]
    twins.near = 2e-5  # codes in place of exact tokens make hundreds of times that
    twins.speak(token, 40)
    after = [c.store.count for c in twins.plain if hasattr(c, "store")]
    assert all(a >= b + 2 for a, b in zip(after, before, strict=True))
