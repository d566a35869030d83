"""A long text by traced steps of a trained model: token for token what it is without."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from small_models import TINY
from stepping import same_caches, steps_of

import mlxkv

TOKENS = 160  # two pages; with the prompt the sliding window of 512 is passed
# Of keys and values, and of scales; the share of words of codes that differ.
NEAR, CODES = 2e-2, 0.02
PROMPT = "Tell me the whole story of the lighthouse, from its first stone on. " * 25


@pytest.mark.slow
def test_a_long_text():
    """int2 has maps of its own for every layer. Caches hold the same behind the text, but for a code on a
    rounding tie here and there: keys are products in half precision."""
    loaded = mlxkv.load(TINY, "int2")
    model, steps = loaded.model, steps_of(loaded.model)
    text, found = mx.array(loaded.tokenizer.encode(PROMPT)[:400]), []
    for off in (None, "a test"):
        steps.off, caches = off, make_prompt_cache(model)
        walk = generate_step(text, model, max_tokens=TOKENS, prompt_cache=caches)
        found.append(([int(token) for token, _ in walk], caches))
    (ours, traced), (plain, untraced) = found
    assert ours == plain and len(text) + len(ours) > 512
    for one, other in zip(traced, untraced, strict=True):
        same_caches(one, other, NEAR, CODES)
    assert 0 < steps.traced < 32 and not steps.refused
