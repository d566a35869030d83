"""Copies and pickles of attached models, caches out of place, what users set: right, or one clear line."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as mlx_cache
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import base, llama
from mlx_lm.models.cache import make_prompt_cache
from random_models import random_model, tokens
from small_models import TINY

import mlxkv
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.errors import UserError
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach, detach

EARLY = replace(PRESETS["int4"], sink=16, recent=16, page=16)  # pages are quantized early
PLAIN = base.scaled_dot_product_attention
NOT_ATTACHED = r"^\[attach\] only an attached model reads compressed caches; got one in a model"


@pytest.fixture
def model(unbound):
    model = random_model("llama")
    yield model
    detach(model)


def last(model, text: mx.array, cache: list | None = None) -> mx.array:
    """The logits behind `text`, which is read into a new cache of the model unless one is given."""
    return model(text[None], cache=cache or make_prompt_cache(model))[0, -1]


def kinds(model) -> set[str]:
    return {type(cache).__name__ for cache in make_prompt_cache(model)}


# -- copies of models


def unpickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("twin", [copy.deepcopy, unpickled])
@pytest.mark.parametrize("first", [0, 1])
def test_a_copy_is_a_model_of_its_own(model, twin, first):
    attach(model, EARLY)
    text = tokens(100)
    right = last(model, text)
    pair = [model, twin(model)]
    assert kinds(pair[1]) == {"CompressedKVCache"}
    assert make_prompt_cache(pair[1])[0].config == EARLY
    detach(pair[first])
    left = pair[1 - first]
    assert mx.array_equal(last(left, text), right)
    assert kinds(left) == {"CompressedKVCache"} and kinds(pair[first]) == {"KVCache"}
    detach(left)
    assert llama.scaled_dot_product_attention is PLAIN
    assert mx.array_equal(last(left, text), last(pair[first], text))


def test_a_loaded_model_is_copied_with_its_calibration(tmp_path, monkeypatch, model_folder):
    from mlxkv.calibration import measure
    from mlxkv.formats.calibration import artifact

    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(measure, "TOKENS", 600)
    model = mlxkv.load(str(model_folder), "oscar-int2").model
    text = tokens(400)
    right = last(model, text)
    for other in (copy.deepcopy(model), unpickled(model)):
        assert mx.array_equal(last(other, text), right)
        ours, theirs = (make_prompt_cache(m)[0].layer_maps for m in (model, other))
        assert ours is theirs
        detach(other)
    detach(model)


# -- what users set


NO_MODELS = (None, TINY, nn.Linear(2, 2), (nn.Linear(2, 2), 1), {}, random_model)


def test_what_is_no_model():
    for what in NO_MODELS:
        calls = [lambda what=what: attach(what, "int4")]
        if not isinstance(what, nn.Module):
            calls.append(lambda what=what: detach(what))
        for call in calls:
            with pytest.raises(
                UserError, match=r"^\[attach\] takes a model of mlx-lm.*; got \w+; choose"
            ):
                call()


def test_kv_bits_warn_and_change_nothing(model):
    attach(model, EARLY)
    text = tokens(60)
    plain = [t for t, _ in generate_step(text, model, max_tokens=4)]
    with pytest.warns(
        UserWarning, match="kv_bits has no effect on layers that are compressed"
    ) as said:
        found = [
            t for t, _ in generate_step(text, model, max_tokens=4, kv_bits=4, quantized_kv_start=0)
        ]
    assert found == plain
    assert all("got 4" in str(one.message) for one in said)


def test_max_kv_size_warns(model):
    attach(model, EARLY)
    with pytest.warns(UserWarning, match="max_kv_size has no effect on an attached model") as said:
        cache = make_prompt_cache(model, max_kv_size=32)
    assert type(cache[0]) is CompressedKVCache
    assert said[0].filename == __file__
    with pytest.warns(UserWarning, match="max_kv_size"):
        next(generate_step(tokens(8), model, max_kv_size=32))


# -- caches out of place


def test_a_cache_used_after_detach(model):
    attach(model, EARLY)
    text, cache = tokens(60), make_prompt_cache(model)
    last(model, text, cache)
    detach(model)
    with pytest.raises(UserError, match=NOT_ATTACHED):
        last(model, text[:1], cache)


def test_a_cache_of_another_shape_in_an_attached_model(model):
    attach(model, EARLY)
    cache = make_prompt_cache(model)
    last(model, tokens(20), cache)
    heads = cache[0].keys_and_values()[0].recent[0].shape[1]
    x = mx.zeros((1, heads + 1, 1, 64))
    for wrong in ((x, x), (x[:, :heads, :, :32],) * 2, (x[:, :heads], x[:, :heads, :, :32])):
        with pytest.raises(UserError, match=r"the cache holds \d heads of .*, as of another model"):
            cache[0].update_and_fetch(*wrong)
    assert cache[0].offset == 20


def test_hosts_find_no_bits_on_a_cache():
    """Hosts ask so for mlx-lm's own quantized caches."""
    cache = CompressedKVCache(EARLY)
    assert not hasattr(cache, "bits") and not hasattr(BatchedKVCache([cache]), "bits")


# -- pickles of caches


def filled(kv: str | None, count: int, batch: int = 1) -> CompressedKVCache:
    cache = CompressedKVCache(EARLY if kv is None else PRESETS[kv])
    mx.random.seed(count)
    x = mx.random.normal((batch, 2, count, 64)).astype(mx.bfloat16)
    cache.update_and_fetch(x, -x)
    return cache


def same_state(one, other) -> bool:
    ours, theirs = (dict(tree_flatten(cache.state)) for cache in (one, other))
    return ours.keys() == theirs.keys() and all(
        mx.array_equal(x, theirs[n]) for n, x in ours.items()
    )


@pytest.mark.parametrize(("kv", "count"), [(None, 5), ("polar", 600)])
def test_a_cache_comes_back_from_a_pickle(kv, count):
    cache = filled(kv, count)
    back = unpickled(cache)
    assert type(back) is CompressedKVCache and back.offset == count
    assert back.config == cache.config and same_state(back, cache)
    x = mx.ones((1, 2, 1, 64), mx.bfloat16)
    for one in (cache, back):
        one.update_and_fetch(x, x)
    assert same_state(back, cache)


def test_a_pickle_of_a_batch():
    batch = CompressedKVCache.merge([filled(None, 70), filled(None, 40)])
    back = unpickled(batch)
    assert back.offset.tolist() == [70, 40]
    assert all(same_state(back.extract(i), batch.extract(i)) for i in range(2))


# -- prompt caches of another process

LOAD = """
import sys
import mlx_lm.models.cache as of_mlx_lm
from mlx_lm.models.llama import Model, ModelArgs
from mlxkv import attach, load_prompt_cache
assert not hasattr(of_mlx_lm, "CompressedKVCache")  # importing changes nothing of mlx-lm
if sys.argv[2:]:
    print(type(load_prompt_cache(sys.argv[1], return_metadata=True)[0][0]).__name__)
else:
    attach(Model(ModelArgs("llama", 64, 1, 64, 1, 1e-5, 64)), "int4")
    print(type(of_mlx_lm.load_prompt_cache(sys.argv[1])[0]).__name__)
"""


def test_prompt_caches_load_without_a_model_or_once_one_is_attached(tmp_path):
    file = tmp_path / "cache.safetensors"
    mlx_cache.save_prompt_cache(str(file), [filled(None, 40)])
    for more in ([], ["ours"]):
        args = [sys.executable, "-c", LOAD, file, *more]
        ran = subprocess.run(args, capture_output=True, text=True)
        assert ran.stdout.strip() == "CompressedKVCache", ran.stderr
