"""Sequences in arrays of all: each gets what it gets alone. Kernels in the emulator, at small shapes."""

import copy
from dataclasses import replace
from random import Random

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from on_emulator import make, make_tiles
from random_models import random_model, tokens
from samples import data, rms
from small_caches import SMALL, alone, together

from mlxkv.cache.attention import attend
from mlxkv.cache.batch import BatchedKVCache
from mlxkv.cache.batch_buffers import BatchBuffers
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.cache.pages import Pages
from mlxkv.cache.view import RowsView
from mlxkv.codec.maps import sample
from mlxkv.formats.config import Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import Affine, MixedBits
from mlxkv.formats.records import record_layout
from mlxkv.formats.sizes import MORE
from mlxkv.loading.attach import attach
from mlxkv.metal import attend as kernels
from mlxkv.metal import launch
from mlxkv.metal import lengths as known
from mlxkv.serve.sessions import shapes_of

HEADS, KV_HEADS, DIMS = 8, 2, 64
# Keys with a header for each page; no sink.
CHANNELS = replace(SMALL, keys=Side(Affine(2, 32, axis="channel")), sink=0)
BLOCKS = replace(
    SMALL, keys=Side(MixedBits(2.6, (4, 3, 2, 1))), values=Side(MixedBits(2.6, (3, 3, 2, 1)))
)


pytestmark = pytest.mark.usefixtures("trusted")


def pair(batch: int, count: int, seed: int, dtype=mx.float32):
    shape = (batch, KV_HEADS, count, DIMS)
    return tuple(mx.array(data(*shape, seed=seed + i)).astype(dtype) for i in range(2))


def filled(config, lengths, dtype=mx.float32) -> list[CompressedKVCache]:
    caches = [CompressedKVCache(config) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        if length:
            cache.update_and_fetch(*pair(1, length, length, dtype))
    return caches


def step(batch: BatchedKVCache, caches, new: int, seed: int, bound: float, dtype=mx.float32):
    """The same tokens for the batch and for each alone; the batch's view."""
    keys, values = pair(len(caches), new, seed, dtype)
    queries = mx.array(data(len(caches), HEADS, new, DIMS, seed=seed + 9)).astype(dtype)
    mask = None if new == 1 else "causal"
    view, _ = batch.update_and_fetch(keys, values)
    got = attend(queries, view, 0.125, mask)
    for i, cache in enumerate(caches):
        one = slice(i, i + 1)
        want = attend(queries[one], cache.update_and_fetch(keys[one], values[one])[0], 0.125, mask)
        assert rms(got[one], want) < bound
    assert view.tokens == max(cache.offset for cache in caches)
    return view


def is_same(ours: CompressedKVCache, other: CompressedKVCache) -> bool:
    """To the bit, spare capacity aside."""
    a, b = (dict(tree_flatten(cache.state)) for cache in (ours, other))
    return a.keys() == b.keys() and all(bool(mx.array_equal(a[name], b[name])) for name in a)


@pytest.mark.parametrize(
    ("factory", "config", "dtype", "bound"),
    [
        (make_tiles, CHANNELS, mx.float16, 3e-3),
        (make, BLOCKS, mx.float32, 1e-5),
    ],
    ids=("tiles", "portable, blocks"),
)
def test_each_gets_what_it_gets_alone(factory, config, dtype, bound):
    with launch.using(factory):
        caches = filled(config, (150, 0, 70), dtype)  # no page of the second is quantized
        batch = BatchedKVCache.merge(caches)
        for seed, new in enumerate((1, 8, 1, 7, 8)):
            view = step(batch, caches, new, 100 * seed, bound, dtype)
            assert view.lengths
        assert batch.offset.tolist() == [175, 25, 95]
        counts = [records for records, *_ in view.lengths.rows]
        assert len(set(counts)) == 3 and counts[1] == 0
        assert all(is_same(batch.extract(i), cache) for i, cache in enumerate(caches))


def test_kernels_read_records_from_where_a_sequence_starts():
    """Records and headers of a batch in one buffer, in another order, with gaps, and each in its own."""
    both = record_layout(CHANNELS, DIMS, DIMS)
    with launch.using(make):
        store = CompressedKVCache(CHANNELS).page_store((DIMS, DIMS), mx.float32)
        shared = store.encode(pair(1, 192, 5), 192, 0)  # 6 pages of 2 records

    def pages(x, first, last):
        rows = x.shape[2] // 6
        return x[:, :, first * rows : last * rows]

    rows = (4, 0, 3), (2, 0, 3)
    # Pages 3 and 4 are those of the first sequence, page 1 that of the second, which has room behind.
    own = {name: mx.concatenate([pages(x, 3, 5), pages(x, 1, 3)]) for name, x in shared.items()}
    q, recent = mx.array(data(2, KV_HEADS, 4, DIMS, seed=3)), pair(2, 3, 8)
    out = [
        kernels.attend(
            q.reshape(2, -1, 1, DIMS),
            [kernels.Run(arrays["records"], 4, both, headers=arrays["headers"])],
            *(None, recent, lengths, 0.125, make),
        )
        for arrays, lengths in (
            (shared, known.batch_lengths(rows, (6, 2))),
            (own, known.separate_lengths(rows, KV_HEADS * own["records"].shape[2], 2)),
        )
    ]
    assert mx.array_equal(*out)


# -- joining and leaving


class Walk:
    """A batch, and the same sequences as caches of their own."""

    def __init__(self, seed: int):
        self.random, self.seed = Random(seed), 1000 * seed
        self.caches = filled(SMALL, (90, 0))
        self.batch = BatchedKVCache.merge(self.caches)
        (self.shape,) = shapes_of(filled(SMALL, (1,)))

    def step(self) -> None:
        actions = ["decode"] * 6 + ["join", "leave", "trim", "read", "mask", "copy", "extract"]
        action = self.random.choice(actions)
        self.seed += 10
        getattr(self, f"_{action}")()
        assert self.batch.offset.tolist() == [cache.offset for cache in self.caches]
        assert self.batch.size() == max(cache.offset for cache in self.caches)
        if self.batch.buffers is not None:  # what a server sets aside for them is enough
            assert self.shape.together
            need = sum(self.shape.allocated(one.offset, 20, most=True) for one in self.caches)
            assert self.batch.nbytes <= need

    def _decode(self, new: int | None = None) -> None:
        new = new or self.random.choice((1, 1, 1, 5, 8))
        view = step(self.batch, self.caches, new, self.seed, 1e-5)
        assert len(self.caches) == 1 or view.lengths

    def _join(self) -> None:
        more = filled(
            SMALL, self.random.choices((0, 3, 63, 120, 200), k=self.random.choice((1, 2)))
        )
        if len(self.caches) + len(more) > 5:
            return
        other = BatchedKVCache.merge(more)
        if self.random.random() < 0.5:
            step(other, more, 1, self.seed, 1e-5)  # others that have been decoded together
        self.batch.extend(other)
        self.caches += more

    def _leave(self) -> None:
        count = self.random.randint(1, len(self.caches))
        keep = self.random.sample(range(len(self.caches)), count)
        self.batch.filter(mx.array(keep) if count % 2 else keep)
        self.caches = [self.caches[i] for i in keep]

    def _trim(self) -> None:
        count = self.random.choice((0, 2, 40))
        least = min(count, *(cache.offset for cache in self.caches), 1 << 30)
        assert self.batch.trim(count) == least
        for cache in self.caches:
            cache.trim(least)

    def _read(self) -> None:
        """A chunk of a prompt, padded."""
        lengths = [self.random.randint(0, 20) for _ in self.caches]
        keys, values = pair(len(lengths), max(lengths) or 1, self.seed)
        self.batch.prepare(lengths=lengths, right_padding=[1] * len(lengths))
        if any(lengths):
            view, _ = self.batch.update_and_fetch(keys, values)
            assert isinstance(view, RowsView)
        self.batch.finalize()
        for i, (cache, n) in enumerate(zip(self.caches, lengths, strict=True)):
            if n:
                cache.update_and_fetch(*(x[i : i + 1, :, :n] for x in (keys, values)))

    def _mask(self) -> None:
        """What takes no kernel: sequence by sequence from the arrays of all."""
        self._decode(1)
        view, _ = self.batch.keys_and_values()
        queries = mx.array(data(len(self.caches), HEADS, 1, DIMS, seed=self.seed))
        mask = mx.zeros((len(self.caches), 1, 1, view.tokens))
        got = attend(queries, view, 0.125, mask)
        for i, cache in enumerate(self.caches):
            want = attend(
                queries[i : i + 1], cache.keys_and_values()[0], 0.125, mask[:1, ..., : cache.offset]
            )
            assert isinstance(view, RowsView) or rms(got[i : i + 1], want) < 1e-5

    def _copy(self) -> None:
        """Goes on with the copy; the original must not reach it."""
        before, self.batch = self.batch, copy.deepcopy(self.batch)
        before.update_and_fetch(*pair(len(self.caches), 1, self.seed))

    def _extract(self) -> None:
        i = self.random.randrange(len(self.caches))
        out = self.batch.extract(i)
        assert is_same(out, self.caches[i])
        out.update_and_fetch(*pair(1, 40, self.seed))  # what was taken out is nobody else's

    def finish(self) -> None:
        assert all(is_same(self.batch.extract(i), c) for i, c in enumerate(self.caches))


def test_any_walk_gives_what_each_gives_alone():
    with launch.using(make):
        walk = Walk(0)
        for _ in range(30):
            walk.step()
        walk.finish()


def test_a_sequence_that_is_kept_twice_becomes_two():
    with launch.using(None):
        caches = filled(SMALL, (150, 90))
        batch = BatchedKVCache.merge(caches)
        step(batch, caches, 1, 0, 1e-5)
        batch.filter([1, 0, 1])
        caches = [caches[1], caches[0], copy.deepcopy(caches[1])]
        for seed in range(6):
            step(batch, caches, 8, 100 * seed, 1e-5)  # beyond the next page


def test_a_row_that_is_chosen_keeps_its_own_exact_page():
    """One sequence has one, the others have none."""
    for order in ([1], [1, 0], [2, 0, 1], [0, 0, 2]):
        with launch.using(make):
            caches = filled(SMALL, (150, 40, 20))
            batch = BatchedKVCache.merge(caches)
            step(batch, caches, 1, 0, 1e-5)
            batch.filter(order)
            caches = [copy.deepcopy(caches[i]) for i in order]
            assert all(is_same(batch.extract(i), cache) for i, cache in enumerate(caches))


def test_pages_that_are_quantized_at_once_are_each_its_own():
    with launch.using(make):
        caches = filled(SMALL, (111, 143))
        batch = BatchedKVCache.merge(caches)
        for seed in (0, 10, 20):
            step(batch, caches, 1, seed, 1e-5)
        assert batch.buffers.pages.counts == [2, 3]
        assert all(is_same(batch.extract(i), cache) for i, cache in enumerate(caches))


def test_caches_of_other_maps_stay_apart():
    """Also before a page is quantized."""
    config = replace(PRESETS["oscar-int4"], sink=16, recent=32, page=32)
    one, other = sample(KV_HEADS, (DIMS, DIMS)), replace(sample(KV_HEADS, (DIMS, DIMS)))
    with launch.using(make):
        for both, is_together in (((one, one), True), ((one, other), False)):
            caches = [CompressedKVCache(config, layer_maps) for layer_maps in both]
            for cache in caches:
                cache.update_and_fetch(*pair(1, 20, 3))
            view = step(BatchedKVCache.merge(caches), caches, 1, 0, 1e-5)
            assert (not isinstance(view, RowsView)) == is_together


def test_masks_of_shared_arrays_are_those_of_each_sequence(subtests):
    with launch.using(make):
        caches = filled(SMALL, (90, 40))
        batch = BatchedKVCache.merge(caches)
        step(batch, caches, 1, 0, 1e-5)
        assert batch.buffers is not None
    for window in (None, 16):
        with subtests.test(window=window):
            mask = batch.make_mask(3, True, window)
            assert mask.shape == (2, 1, 3, 94)
            for got, cache in zip(mask[:, 0], caches, strict=True):
                want = cache.make_mask(3, True, window)
                assert mx.array_equal(got[:, : want.shape[1]], want)
                assert not got[:, want.shape[1] :].any()


def test_a_copy_of_a_batch_does_not_see_what_the_original_quantizes():
    """In the copy the sink is still recent, and no page is quantized."""
    with launch.using(make):
        caches = filled(SMALL, (SMALL.window - 4, 40))
        batch = BatchedKVCache.merge(caches)
        step(batch, caches, 1, 0, 1e-5)
        twin, before = copy.deepcopy(batch), copy.deepcopy(caches)
        for seed in (10, 20):
            step(batch, caches, 8, seed, 1e-5)
        batch.buffers.flush()
        assert batch.buffers.pages.counts == [1, 0]
        assert all(is_same(twin.extract(i), cache) for i, cache in enumerate(before))
        step(twin, before, 8, 30, 1e-5)


def test_a_sink_without_pages_is_read_through_a_mask():
    """A sequence that was cut back to its first page: nothing is quantized, its sink has moved out."""
    with launch.using(make):
        caches = filled(SMALL, (SMALL.window + 1, 90))
        caches[0].trim(SMALL.window + 1 - SMALL.sink - 5)
        batch = BatchedKVCache.merge(caches)
        view = step(batch, caches, 1, 0, 1e-5)
        assert view.lengths.rows[0][:3] == (0, SMALL.sink, 6)
        queries = mx.array(data(2, HEADS, 1, DIMS, seed=3))
        got = attend(queries, view, 0.125, mx.zeros((2, 1, 1, view.tokens)))
        for i, cache in enumerate(caches):
            want = attend(queries[i : i + 1], cache.keys_and_values()[0], 0.125)
            assert rms(got[i : i + 1], want) < 1e-5


def test_caches_of_other_kinds_stay_apart():
    with launch.using(make):
        a, b = filled(SMALL, (90, 40))
        (c,) = filled(CHANNELS, (90,))
        batch = BatchedKVCache.merge([a, b, c])
        assert isinstance(step(batch, [a, b, c], 1, 0, 1e-5), RowsView)
        batch.filter([0, 1])
        assert step(batch, [a, b], 1, 50, 1e-5).lengths
        batch.extend(BatchedKVCache.merge([c]))
        assert isinstance(step(batch, [a, b, c], 1, 90, 1e-5), RowsView)
    with launch.using(None):
        caches = filled(SMALL, (90, 40))
        assert isinstance(step(BatchedKVCache.merge(caches), caches, 1, 0, 1e-5), RowsView)


def test_a_model_decodes_a_batch_as_each_alone(monkeypatch):
    """By mlx-lm's own batches, whose sequences come and go."""
    model, sizes, append = random_model("llama", num_hidden_layers=1), [], BatchBuffers.append

    def noted(self, keys, values):
        sizes.append(keys.shape[0])
        return append(self, keys, values)

    monkeypatch.setattr(BatchBuffers, "append", noted)
    with launch.using(make):
        attach(model, SMALL, strict=True)
        prompts = [tokens(n, seed=n).tolist() for n in (70, 3, 120)]
        replies = (12, 20, 8)
        expected = [alone(model, p, n) for p, n in zip(prompts, replies, strict=True)]
        assert together(model, prompts, replies, late=1) == expected
    assert {2, 3} <= set(sizes)


# -- the pool


def test_a_pool_holds_what_lists_hold():
    """Pages as numbers, each in two arrays, against lists of them."""
    both, random, next_page = record_layout(CHANNELS, DIMS, DIMS), Random(1), 0
    widths = {"records": (2, both.words), "headers": (1, both.header_words)}
    pool, lists, grown = Pages.of_many(both, 32, 1), [], 0

    def pages(numbers):
        out = {}
        for name, (rows, words) in widths.items():
            x = np.repeat(np.array(numbers, np.uint32), rows)[None, None, :, None]
            out[name] = mx.array(np.broadcast_to(x, (*x.shape[:3], words)))
        return out

    for _ in range(300):
        action = random.choice(["append"] * 6 + ["join", "select"])
        if action == "append" and lists:
            i, before = random.randrange(len(lists)), pool.arrays["records"]
            pool.append(pages([next_page]), 1, i)
            lists[i].append(next_page)
            next_page += 1
            grown += pool.arrays["records"] is not before
        elif action == "join" and len(lists) < 6:
            new = [list(range(random.choice((0, 1, 5, 40)))) for _ in range(random.choice((1, 2)))]
            pool.join([(pages(x) if x else {}, len(x)) for x in new])
            lists += new
        elif action == "select" and len(lists) > 1:
            at = random.sample(range(len(lists)), random.randint(1, len(lists)))
            pool.select(at)
            lists = [lists[i] for i in at]
            stored = sum(map(len, lists))
            assert pool.capacity <= MORE + 1.5 * (stored + len(lists) * max(1, stored // 16))
        for i, numbers in enumerate(lists):
            found = pool.read(i=i)
            for name, x in found.items():
                rows = widths[name][0]
                assert np.array(x)[0, 0, ::rows, 0].tolist() == numbers
            assert bool(found) == bool(numbers)
    assert 0 < grown < 100
