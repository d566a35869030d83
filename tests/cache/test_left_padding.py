"""What mlx-vlm asks of caches, without mlx-vlm: batches of prompts that are padded on the left, snapshots of a
prefix."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlxkv.cache.attention import attend
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv

INT4 = parse_kv("int4")
LENGTHS, CHUNK = (290, 40, 171), 100
WIDTH = max(LENGTHS)
PADDING = [WIDTH - n for n in LENGTHS]


def inputs(new: int, seed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries of four heads, keys and values of two, for three sequences."""
    key = mx.random.key(seed)
    return tuple(
        mx.random.normal((3, heads, new, 64), key=one)
        for heads, one in zip((4, 2, 2), mx.random.split(key, 3), strict=True)
    )


def causal(columns: int, new: int, padding: list[int]) -> mx.array:
    """The mask of mlx-vlm's own batches: [B, 1, new, columns + new], with columns for padding."""
    at, rows = mx.arange(columns + new), mx.arange(columns, columns + new)[:, None]
    return (rows >= at) & (mx.array(padding)[:, None, None, None] <= at)


def step(batch, alone, queries, keys, values, padding, columns, kind):
    """One step of the batch and of each sequence alone. kind: of the batch's mask."""
    new = keys.shape[2]
    masks = {
        "word": lambda: batch.make_mask(new),
        "array": lambda: batch.make_mask(new, True),
        "of the model": lambda: causal(columns, new, padding),
    }
    mask = masks[kind]()
    view, same = batch.update_and_fetch(keys, values)
    assert same is view and view.shape[0] == len(alone)
    out = attend(queries, view, 0.1, mask)
    again = attend(queries, batch.keys_and_values()[0], 0.1, mask)  # a layer that shares the cache
    assert out.shape == (len(alone), 4, new, 64)
    for i, (cache, left) in enumerate(zip(alone, padding, strict=True)):
        skip = min(new, max(0, left - columns))
        assert not mx.any(out[i, :, :skip]).item()
        if skip == new:
            continue
        own, _ = cache.update_and_fetch(keys[i : i + 1, :, skip:], values[i : i + 1, :, skip:])
        word = "causal" if new - skip > 1 else None
        expected = attend(queries[i : i + 1, :, skip:], own, 0.1, word)
        assert mx.allclose(out[i : i + 1, :, skip:], expected, atol=2e-5)
        reread = attend(queries[i : i + 1, :, skip:], cache.keys_and_values()[0], 0.1, word)
        assert mx.allclose(again[i : i + 1, :, skip:], reread, atol=2e-5)


def fresh(padding: list[int]) -> tuple[BatchedKVCache, list[CompressedKVCache]]:
    """An empty batch, and an empty cache for each of its sequences."""
    return CompressedKVCache(INT4).to_batch(padding), [CompressedKVCache(INT4) for _ in padding]


def prefilled(kind: str = "word"):
    batch, alone = fresh(PADDING)
    assert isinstance(batch, BatchedKVCache) and batch.empty() and batch.batch_size == 3
    assert batch.offset.tolist() == [-n for n in PADDING] and batch.is_padded
    for at in range(0, WIDTH, CHUNK):
        new = min(CHUNK, WIDTH - at)
        step(batch, alone, *inputs(new, at), PADDING, at, kind)
    assert batch.offset.tolist() == list(LENGTHS) and not batch.is_padded
    return batch, alone


@pytest.mark.parametrize("kind", ["word", "array", "of the model"])
def test_each_prompt_is_read_as_it_is_alone(kind):
    batch, alone = prefilled(kind)
    for at in range(WIDTH, WIDTH + 3):
        step(batch, alone, *inputs(1, at), PADDING, at, "word")
    step(batch, alone, *inputs(4, 7), PADDING, WIDTH + 3, kind)  # a draft to verify
    for i, cache in enumerate(alone):
        row = batch.extract(i)
        assert row.offset == cache.offset == LENGTHS[i] + 7
        assert all(map(mx.array_equal, row.arrays(), cache.arrays()))


def test_a_copy_goes_on_in_the_middle_of_padding():
    batch, alone = fresh(PADDING)
    step(batch, alone, *inputs(CHUNK, 0), PADDING, 0, "array")
    batch = copy.deepcopy(copy.copy(batch))
    step(batch, alone, *inputs(CHUNK, 1), PADDING, CHUNK, "array")
    assert batch.offset.tolist() == [200, 200 - PADDING[1], 200 - PADDING[2]]


def test_a_prompt_that_leaves_while_others_are_read():
    """The longest one: what is padding for all that stay is no column any more."""
    batch, alone = fresh(PADDING)
    step(batch, alone, *inputs(CHUNK, 0), PADDING, 0, "of the model")
    batch.filter(mx.array([1, 2]))
    alone, padding = alone[1:], [n - CHUNK for n in PADDING[1:]]  # the 100 columns are dropped
    two = [x[1:] for x in inputs(CHUNK, 1)]
    step(batch, alone, *two, padding, 0, "of the model")
    two = [x[1:] for x in inputs(90, 2)]
    step(batch, alone, *two, padding, CHUNK, "array")
    assert batch.offset.tolist() == [40, 171]


def test_a_chunk_that_is_padding_alone():
    batch = CompressedKVCache(INT4).to_batch([9, 9])
    queries, keys, values = (x[:2] for x in inputs(5, 0))
    view, _ = batch.update_and_fetch(keys, values)
    assert view.shape == (2, 2, 0, 64) and view.dtype == mx.float32
    assert not mx.any(attend(queries, view, 0.1, "causal")).item()


def test_sequences_join_and_leave_afterwards():
    batch, alone = prefilled()
    other, more = fresh([0, 3])
    step(other, more, *(x[:2] for x in inputs(20, 1)), [0, 3], 0, "array")
    batch.extend(other)
    assert batch.offset.tolist() == [*LENGTHS, 20, 17]
    batch.filter([3, 0, 4])
    kept = [more[0], alone[0], more[1]]
    step(batch, kept, *inputs(1, 5), [0] * 3, WIDTH, "word")
    assert batch.offset.tolist() == [21, WIDTH + 1, 18]


def test_caches_that_hold_tokens_are_not_padded():
    cache = CompressedKVCache(INT4)
    cache.update_and_fetch(*(x[:1] for x in inputs(4, 0)[1:]))
    with pytest.raises(UserError, match="an empty batch; got a cache of 4 tokens; choose merge"):
        cache.to_batch([0])
    with pytest.raises(UserError, match="comes before all tokens.* pad on the right instead"):
        BatchedKVCache([cache]).prepare(left_padding=[3])


def copied(one):
    return mx.array(one) if isinstance(one, mx.array) else one


@pytest.mark.parametrize("length", [0, 30, 300])
def test_a_snapshot_of_a_prefix(length):
    """mlx-vlm copies the arrays, makes an object without calling its constructor, and restores it."""
    cache = CompressedKVCache(INT4)
    x = mx.random.normal((1, 2, length + 1, 64), key=mx.random.key(3))
    if length:
        cache.update_and_fetch(x[:, :, :length], x[:, :, :length])
    snapshot = tree_map(copied, cache.prefix_cache_snapshot())
    with pytest.raises(TypeError):
        CompressedKVCache()
    fresh = CompressedKVCache.__new__(CompressedKVCache)
    fresh.prefix_cache_restore(snapshot)
    assert list(fresh.prefix_cache_reserve(1000)) == []
    assert fresh.offset == length and fresh.config == cache.config and fresh.nbytes <= cache.nbytes
    last = x[:, :, length:]
    ours, theirs = (one.update_and_fetch(last, last)[0] for one in (fresh, cache))
    q = mx.random.normal((1, 4, 1, 64))
    assert mx.allclose(attend(q, ours, 0.1), attend(q, theirs, 0.1), atol=1e-5)


def test_snapshots_become_a_batch():
    _, alone = prefilled()
    batch = alone[0].prefix_cache_merge(alone, list(LENGTHS))
    batch.prepare(lengths=[5, 2, 3], right_padding=[0, 3, 2])
    queries, keys, values = inputs(5, 1)
    view, _ = batch.update_and_fetch(keys, values)
    assert mx.isfinite(attend(queries, view, 0.1, "causal")).all().item()
    batch.finalize()
    assert batch.offset.tolist() == [WIDTH + 5, 42, 174]
    assert not batch.is_single_row() and BatchedKVCache([batch.extract(0)]).is_single_row()
    assert alone[0].prefix_cache_merge([alone[0], object()], [1, 1]) is None


def test_masks_hide_padding_on_the_left():
    """From layers that do not compress, too, which read the same mask."""
    batch = BatchedKVCache.merge([CompressedKVCache(parse_kv("int4")) for _ in range(2)])
    batch.pad([2, 0])
    mask = np.array(batch.make_mask(4, return_array=True))
    rows, columns = np.arange(4)[:, None], np.arange(4)
    for padding, one in zip((2, 0), mask, strict=True):
        np.testing.assert_array_equal(one[0], (rows >= columns) & (columns >= padding))
