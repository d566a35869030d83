"""Several sequences as one batch: mlx-lm's BatchGenerator gives each what it gets alone."""

import copy
import pickle

import mlx.core as mx
import pytest
from random_models import random_model, tokens
from small_caches import alone, together
from small_models import TINY

from mlxkv.cache.attention import attend
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.errors import UserError
from mlxkv.formats.presets import PRESETS
from mlxkv.loading.attach import attach
from mlxkv.loading.load import load

LENGTHS, REPLIES = (150, 3, 270, 60), (12, 40, 5, 20)


def check(model):
    prompts = [tokens(n, seed=n).tolist() for n in LENGTHS]
    expected = [alone(model, p, n) for p, n in zip(prompts, REPLIES, strict=True)]
    assert together(model, prompts, REPLIES) == expected


@pytest.mark.parametrize("kv", ["int4", "polar"])
def test_each_gets_what_it_gets_alone(kv):
    model = random_model("llama")
    attach(model, kv, strict=True)
    check(model)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "qwen3_next", "gemma3n"])
def test_so_it_is_beside_caches_of_other_kinds(family):
    """Sliding windows, attention sinks, states, layers that read another's cache: mlx-lm's own batches,
    ours for what grows."""
    model = random_model(family)
    attach(model, "int4")
    check(model)


def test_a_basis_that_follows_the_text():
    model = load(TINY, "oja-0.75+int4").model
    prompts = [tokens(n, seed=n).tolist() for n in (150, 5)]
    expected = [alone(model, p, 12) for p in prompts]
    assert together(model, prompts, (12, 12), late=1) == expected


# -- the contract


def filled(*lengths: int, kv: str = "int4") -> list[CompressedKVCache]:
    out = []
    for length in lengths:
        mx.random.seed(length)
        cache = CompressedKVCache(PRESETS[kv])
        if length:
            cache.update_and_fetch(*(mx.random.normal((1, 2, length, 64)) for _ in range(2)))
        out.append(cache)
    return out


def seen(cache: CompressedKVCache) -> list:
    """All that a cache holds."""
    return [x.tolist() for x in cache.arrays()] if not cache.empty() else []


def holds(batch: BatchedKVCache, caches: list[CompressedKVCache]) -> bool:
    got = [batch.extract(i) for i in range(len(batch.rows))]
    return [(c.offset, seen(c)) for c in got] == [(c.offset, seen(c)) for c in caches]


def test_merge_and_extract_are_inverses():
    caches = filled(300, 0, 40, 200)
    batch = caches[0].merge(caches)
    assert holds(batch, caches)
    assert batch.offset.tolist() == [300, 0, 40, 200]
    assert batch.size() == 300 and not batch.empty()
    assert batch.nbytes == sum(cache.nbytes for cache in caches)  # no padding is stored


def test_filter_and_extend_are_inverses():
    caches = filled(300, 40, 200)
    batch = BatchedKVCache.merge(caches)
    rest = copy.deepcopy(batch)
    batch.filter(mx.array([0, 2]))
    rest.filter([1])
    assert holds(batch, [caches[0], caches[2]]) and holds(rest, [caches[1]])
    batch.extend(rest)
    assert holds(batch, [caches[0], caches[2], caches[1]])
    batch.filter([])
    assert batch.empty() and batch.size() == 0


def test_what_is_taken_out_stays_as_it_was():
    caches = filled(100, 200)
    before = [seen(cache) for cache in caches]
    batch = BatchedKVCache.merge(caches)
    out = batch.extract(1)
    new = mx.ones((2, 2, 50, 64))
    batch.update_and_fetch(new, new)
    assert batch.trim(20) == 20
    assert [seen(cache) for cache in (*caches, out)] == [*before, before[1]]
    assert batch.offset.tolist() == [130, 230]


def test_padding_is_neither_stored_nor_attended_to():
    caches = filled(200, 0)
    batch = BatchedKVCache.merge(caches)
    x = mx.random.normal((2, 2, 30, 64))
    q = mx.random.normal((2, 4, 30, 64))
    batch.prepare(lengths=[30, 12], right_padding=[0, 18])
    outs = []
    for start in (0, 20):  # the second step is padding alone for the second sequence
        part = slice(start, min(start + 20, 30))
        view, _ = batch.update_and_fetch(x[:, :, part], x[:, :, part])
        outs.append(attend(q[:, :, part], view, 0.1, "causal"))
    batch.finalize()
    got = mx.concatenate(outs, axis=2)
    assert batch.offset.tolist() == [230, 12]
    for i, length in enumerate((30, 12)):
        single, want = filled((200, 0)[i])[0], []
        for start in range(0, length, 20):
            part = slice(start, min(start + 20, length))
            view, _ = single.update_and_fetch(x[i : i + 1, :, part], x[i : i + 1, :, part])
            want.append(attend(q[i : i + 1, :, part], view, 0.1, "causal"))
        assert mx.array_equal(got[i : i + 1, :, :length], mx.concatenate(want, axis=2))
    assert not got[1, :, 12:].any()


def test_prompts_that_leave_while_others_are_read_take_their_padding_along():
    batch = BatchedKVCache.merge(filled(0, 0, 0))
    x = mx.random.normal((3, 2, 30, 64))
    batch.prepare(lengths=[30, 12, 20], right_padding=[0, 18, 10])
    batch.update_and_fetch(x[:, :, :10], x[:, :, :10])
    for one in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), batch):
        one.filter([2, 0])
        rest = x[mx.array([2, 0]), :, 10:]
        one.update_and_fetch(rest, rest)
        one.finalize()
        assert one.offset.tolist() == [20, 30]


@pytest.mark.parametrize("window", [None, 16])
def test_masks_are_those_of_each_sequence(window):
    batch = BatchedKVCache.merge(filled(5, 0, 90))
    assert batch.make_mask(1) is None and batch.make_mask(3) == "causal"
    mask = batch.make_mask(3, return_array=True, window_size=window)
    assert mask.shape == (3, 1, 3, 93)
    for got, row in zip(mask, batch.rows, strict=True):
        want = row.make_mask(3, True, window)
        assert mx.array_equal(got[0, :, : want.shape[1]], want)
        assert not got[0, :, want.shape[1] :].any()


def test_what_is_refused():
    batch = BatchedKVCache.merge(filled(5, 9))
    with pytest.raises(UserError, match="a batch of 2; got 3"):
        batch.update_and_fetch(mx.zeros((3, 2, 1, 64)), mx.zeros((3, 2, 1, 64)))
    with pytest.raises(UserError, match="pad on the right instead"):
        batch.prepare(left_padding=[1, 0])
    view, _ = batch.keys_and_values()
    with pytest.raises(UserError, match="uses compressed keys as an array"):
        view.swapaxes(1, 2)
    with pytest.raises(UserError, match="mask does not fit a batch"):
        attend(mx.zeros((2, 4, 1, 64)), view, 0.1, mx.zeros((1, 5)))
