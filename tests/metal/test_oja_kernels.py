"""Low rank that follows the text in both bodies of decode attention, on the emulator."""

import gc
from weakref import ref

import mlx.core as mx
import pytest
from low_rank_cache import DIMS, HEADS, KV_HEADS, SCALE, close, config, data, feed, start
from on_emulator import make, make_mma
from samples import softmax

from mlxkv.cache import adaptive, choose
from mlxkv.cache.adaptive import AdaptiveKVCache
from mlxkv.cache.attention import attend, decode_all
from mlxkv.cache.backends import PortableBackend, TileBackend
from mlxkv.codec.maps import sample
from mlxkv.metal import launch, tiles

pytestmark = pytest.mark.usefixtures("trusted")


def test_kernels_read_low_rank_and_two_bases_in_one_pass(subtests):
    """On the emulator, against plain ops on the same codes. No map leads values of "/int8" back."""
    for name, batch, factory, dtype, dims, first, bound in [
        ("oja-r24+int4", 2, make, mx.float32, DIMS, 64, 1e-5),
        ("oja-r24+prompt", 2, make_mma, mx.float16, 40, 1, 2e-3),  # first the calibration's basis
        ("oja-r24+prompt", 2, make, mx.float16, 40, 1, 2e-3),
        ("oja-r24+int8/int8", 1, make_mma, mx.float16, 40, 64, 2e-3),
    ]:
        with subtests.test(name=name, batch=batch, factory=factory):
            made, body = config(name), PortableBackend if factory is make else TileBackend
            with launch.using(factory):
                assert type(choose.plan(made, (dims, dims), dtype).backend) is body
                one = AdaptiveKVCache(made, sample(KV_HEADS, (dims, dims), made.fitted))
                feed(one, 70, chunk=first, batch=batch, dtype=dtype, dims=dims)
                feed(one, 64, 5, 64 if first == 1 else 4, batch, dtype, dims)
                view, q = one.keys_and_values()[0], data(2, 9, HEADS, batch, dims).astype(dtype)
                if first == 1:
                    assert [basis.keys.down.ndim for basis in one.store.bases] == [3, 4]
                assert [type(run.backend) for run in view.pages.parts] == [body] * 2
                out = attend(q, view, SCALE, "causal")
            right = softmax(q, *decode_all(view, mx.float32), SCALE)
            assert close(out.astype(mx.float32), right, bound)


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
