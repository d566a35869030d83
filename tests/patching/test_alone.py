"""Models some of whose layers of one kind are compressed and others not: no batch has a mask for both."""

import copy
import pickle

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from random_models import latent_model, tokens

from mlxkv.loading.attach import attach, detach
from mlxkv.patching.trees import leaves


@pytest.fixture
def model():
    """A sparse index: its keys stay exact beside compressed latents."""
    one = latent_model("deepseek_v32")
    attach(one, "int4")
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
    members = [one for _, one in leaves(caches)]
    for twin in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        assert joining([twin(one) for one in members]) == joining(members)
        assert not all(joining(members))
    text = tokens(300)[None]
    model(text, cache=caches)
    copies = copy.deepcopy(caches)
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
