"""Caches of whole models cut back: any number of tokens, however often, and all layers alike."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model, tokens

from mlxkv.cache.attention import decode_all
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.loading.attach import attach, detach
from mlxkv.patching.trees import leaves, trim_caches

PROMPT, REPLY = 300, 150


def read(model, cache, start: int, stop: int, seed: int = 0) -> mx.array:
    """Logits of the tokens read, one by one: no chunk says which tokens see which exactly."""
    out = [model(tokens(stop, seed)[None, i : i + 1], cache=cache) for i in range(start, stop)]
    return mx.concatenate(out, axis=1)


@pytest.fixture(scope="module")
def model():
    model = random_model("llama")
    attach(model, "srft-int2+g32")
    yield model
    detach(model)


def test_replies_taken_back_leave_what_was_read(model):
    """A reply is taken back twice, though the exact tokens of the pages it filled are gone."""
    fresh, cache = make_prompt_cache(model), make_prompt_cache(model)
    read(model, fresh, 0, PROMPT)
    read(model, cache, 0, PROMPT)
    right, held = read(model, fresh, PROMPT, PROMPT + 8, seed=9), None
    for round_ in range(2):
        read(model, cache, PROMPT, PROMPT + REPLY, seed=round_ + 1)
        before = [x[:, :, :PROMPT] for x in decode_all(cache[0].keys_and_values()[0], mx.float32)]
        assert trim_caches(cache, PROMPT + REPLY, PROMPT)
        held = decode_all(cache[0].keys_and_values()[0], mx.float32)
        for x, y in zip(held, before, strict=True):
            assert mx.abs(x - y).max() < 1e-5
    ours = read(model, cache, PROMPT, PROMPT + 8, seed=9)
    assert mx.abs(ours - right).max() < 0.2 * mx.abs(right).max()


def test_layers_with_sliding_windows_decide_for_all():
    model = random_model("gemma3_text")
    attach(model, "int4")
    cache = make_prompt_cache(model)
    kinds = {type(one) for _, one in leaves(cache)}
    assert CompressedKVCache in kinds and len(kinds) == 2
    read(model, cache, 0, 6)
    assert trim_caches(cache, 6, 4) and {one.offset for one in cache} == {4}
    model(tokens(400)[None], cache=cache)
    held = cache[0].offset
    assert not trim_caches(cache, held, 200)  # the windows have moved on
    assert {one.offset for one in cache} == {held}
    detach(model)


def test_a_plain_layer_keeps_what_it_no_longer_holds():
    """A cache of chunks that has moved on holds its last tokens alone."""
    cut = []
    layer = SimpleNamespace(
        offset=100, start_position=60, is_trimmable=lambda: True, trim=cut.append
    )
    assert not trim_caches([layer], 100, 59) and not cut
    assert trim_caches([layer], 100, 60) and cut == [40]


def test_nothing_to_take_back_is_nothing(model):
    cache = make_prompt_cache(model)
    read(model, cache, 0, 10)
    assert trim_caches(cache, 10, 10) and cache[0].offset == 10
    assert not trim_caches(cache, 10, 0)


def test_states_cannot_be_cut_but_serve_whole():
    """Linear attention, as in Qwen3.5: its states are those of the last token."""
    model = random_model("qwen3_next")
    attach(model, "int4")
    cache = make_prompt_cache(model)
    read(model, cache, 0, 10)
    assert trim_caches(cache, 10, 10) and not trim_caches(cache, 10, 9)
