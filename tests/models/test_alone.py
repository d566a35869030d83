"""Models some of whose layers of one kind are compressed and others not: no batch has a mask for both."""

from __future__ import annotations

import copy
import pickle

import mlx.core as mx
import pytest
from latent_models import latent_model
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from random_models import random_model, tokens

from mlxkv.errors import UserError
from mlxkv.models import attach, detach, summarise

PART = {"default": "int4", "layers": {"0": "fp16"}}
CASES = {  # model, what attach is given
    "plan": (lambda: random_model("llama", num_hidden_layers=3), {"kv": PART}),
    "plan of latents": (lambda: latent_model("deepseek_v3"), {"kv": PART}),
    "lists of latents": (lambda: latent_model("longcat_flash"), {"kv": PART}),
    "windows": (
        lambda: random_model("gemma3_text", sliding_window=420),
        {"kv": {"default": "naive-int4", "layers": {"0": "fp16"}}, "windows": 400},
    ),
    "a sparse index": (lambda: latent_model("deepseek_v32"), {"kv": "int4"}),
}


@pytest.fixture(params=CASES)
def model(request):
    make, given = CASES[request.param]
    one = make()
    attach(one, **given)
    yield one
    detach(one)


def joining(caches: list) -> list[bool]:
    """Of each cache, whether a host may put it into a batch."""
    return [hasattr(cache, "merge") for cache in caches]


def test_hosts_are_told_and_so_are_copies(model, tmp_path):
    caches = make_prompt_cache(model)
    told = joining(caches)
    assert not all(told)
    assert joining(copy.deepcopy(caches)) == joining([copy.copy(one) for one in caches]) == told
    text = tokens(300)[None]
    model(text, cache=caches)
    for copies in (copy.deepcopy(caches), pickle.loads(pickle.dumps(caches))):
        assert joining(copies) == told
        assert [type(one).__name__ for one in copies] == [type(one).__name__ for one in caches]
    assert joining(make_prompt_cache(copy.deepcopy(model))) == told
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches)
    again, more = load_prompt_cache(file), text[:, :1]
    assert mx.array_equal(model(more, cache=again), model(more, cache=caches)).item()


def test_a_batch_is_refused_where_it_would_be_wrong(model):
    batch = BatchGenerator(model, max_tokens=4)
    batch.insert([tokens(30, 1).tolist(), tokens(20, 2).tolist()])
    with pytest.raises(ValueError, match="batching"):
        batch.next()
    batch.close()
    steps = generate_step(tokens(300), model, max_tokens=4)
    assert len(list(steps)) == 4  # one alone is served


def test_other_models_batch_as_before():
    plans = [("int4", {}), ({"default": "int4", "layers": {"0": "int8"}}, {})]
    plans += [("naive-int4", {"windows": 400})]
    for name, changes in (("llama", {}), ("gemma3_text", {"sliding_window": 420})):
        one = random_model(name, **changes)
        for kv, more in plans:
            attach(one, kv, **more)
            assert all(joining(make_prompt_cache(one)))
        detach(one)
    kimi = latent_model("kimi_linear")  # states, and latents in all other layers
    attach(kimi, PART)
    assert all(joining(make_prompt_cache(kimi)))


def test_a_latent_that_a_plan_leaves_exact_is_named_so():
    one = latent_model("deepseek_v3")
    lines = summarise(attach(one, PART))
    assert lines[0] == "layer 0 (latent attention): full precision, as asked for"
    assert lines[2] == "plan: 10.7 bits per value, the mean of layers 0-1"


@pytest.mark.parametrize(
    "plan",
    [
        {"default": "int4+rope8"},
        ["int4", "int4+rope8"],
        {"default": "int8", "layers": {"1": "int8+rope16"}},
        ["int4+rope16", "int4+rope16"],
    ],
)
def test_rotary_bits_of_a_plan_are_refused_without_latents(plan):
    with pytest.raises(
        UserError, match=r"\[--kv\] \+rope\d+ is for rotary keys.* choose presets without it"
    ):
        attach(random_model("llama"), plan)


def test_sequences_of_a_plan_of_latents_are_decoded_together():
    one = latent_model("deepseek_v3")
    attach(one, ["int4+rope8", "int8"])
    texts = [tokens(n, seed).tolist() for n, seed in ((330, 1), (210, 2))]
    alone = [
        [int(t) for t, _ in generate_step(mx.array(text), one, max_tokens=6)] for text in texts
    ]
    batch = BatchGenerator(one, max_tokens=6)
    ids = batch.insert(texts)
    found = {i: [] for i in ids}
    while any(len(said) < 6 for said in found.values()):
        for part in batch.next()[1]:
            found[part.uid].append(part.token)
    batch.close()
    assert [found[i] for i in ids] == alone
