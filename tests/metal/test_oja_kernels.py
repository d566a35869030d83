"""Low rank that follows the text in both bodies of decode attention, on the emulator."""

import gc
from dataclasses import replace
from weakref import ref

import mlx.core as mx
import pytest
from low_rank_cache import DIMS, HEADS, KV_HEADS, SCALE, close, config, data, feed, start
from on_emulator import make, make_mma

from mlxkv.cache import adaptive, choose, stores
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.attention import _whole, attend
from mlxkv.cache.view import OPS, TILES, Parts
from mlxkv.codec.maps import sample
from mlxkv.formats.names import parse_kv
from mlxkv.metal import launch, tiles

pytestmark = pytest.mark.usefixtures("trusted")


def test_kernels_read_low_rank_and_two_bases_in_one_pass(subtests):
    """On the emulator, against plain ops on the same codes."""
    for name, batch in [
        ("oja-r24+int4", 2),
        ("oja-r24+fast+int8/int8", 1),  # no map leads values back
    ]:
        with subtests.test(name=name, batch=batch):
            made = replace(parse_kv(name), page=32, sink=4, recent=16)
            turns = sample(KV_HEADS, (DIMS, DIMS), made.fitted)
            with launch.using(make):
                assert choose.plan(made, (DIMS, DIMS), mx.float32).body != OPS
                one = AdaptiveKVCache(made, turns)
                feed(one, 150, batch=batch)
                feed(one, 80, seed=5, chunk=4, batch=batch)
                view = one.keys_and_values()[0]
                q = data(2, 9, HEADS, batch)
                out = attend(q, view, SCALE, "causal")
            assert type(one._store.runs[0]) is stores.Records if made.follows else True
            if made.follows:
                assert type(view.pages) is Parts and len(view.pages.parts) == 2
            keys, values = _whole(view, mx.float32)
            mask = mx.arange(view.tokens)[None] <= mx.arange(view.tokens - 2, view.tokens)[:, None]
            expected = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE, mask=mask)
            assert close(out, expected, 1e-5)


def test_tiles_read_two_bases_in_one_pass(subtests):
    for name, batch, factory, first in [
        ("oja-r24+prompt", 2, make_mma, 1),  # the first basis is of the calibration: one for both
        ("oja-r24+int8/int8", 1, make_mma, 64),  # no map leads values back
    ]:
        with subtests.test(name=name, batch=batch, factory=factory):
            dims, dtype = 40, mx.float16
            made = config(name)
            with launch.using(factory):
                assert choose.plan(made, (dims, dims), dtype).body == TILES
                one = AdaptiveKVCache(made, sample(KV_HEADS, (dims, dims), made.fitted))
                feed(one, 70, chunk=first, batch=batch, dtype=dtype, dims=dims)
                feed(one, 64, 5, 64 if first == 1 else 4, batch, dtype, dims)
                view, q = one.keys_and_values()[0], data(2, 9, HEADS, batch, dims).astype(dtype)
                if first == 1:
                    assert [basis.keys.down.ndim for basis in one._store.bases] == [3, 4]
                assert len(view.pages.parts) == 2 and all(
                    run.plan.body == TILES for run in view.pages.parts
                )
                out = attend(q, view, SCALE, "causal")
            keys, values = _whole(view, mx.float32)
            mask = mx.arange(view.tokens)[None] <= mx.arange(view.tokens - 2, view.tokens)[:, None]
            expected = mx.fast.scaled_dot_product_attention(
                q.astype(mx.float32), keys, values, scale=SCALE, mask=mask
            )
            assert close(out.astype(mx.float32), expected, 2e-3)


def test_the_order_of_a_basis_goes_with_it():
    """Tiles keep one per basis; a cache that follows the text makes ever more of them."""
    bases = [
        adaptive.transform_of(adaptive.update(start(), data(8, seed), 0.5)) for seed in range(3)
    ]
    for basis in bases:
        made = tiles._map(basis, True, 0)
        assert tiles._map(basis, True, 0) is made and made[1] == KV_HEADS
    alive = [ref(basis) for basis in bases]
    del bases, basis, made
    gc.collect()
    assert not any(basis() for basis in alive)
