"""Transforms by MLX against the spec; per-channel scales, and matrices of each kv head."""

import weakref

import mlx.core as mx
import numpy as np
from samples import normal

from mlxkv.cache import adaptive
from mlxkv.codec import affine, transform
from mlxkv.formats import matrices
from mlxkv.formats.quantizers import Affine
from mlxkv.spec import affine as ref
from mlxkv.spec import codebook as codebook_ref


def test_matrices_are_those_of_the_spec(subtests):
    for dims in (64, 80, 96, 128, 192, 256, 512):
        for seed in (0, 7):
            with subtests.test(dims=dims, seed=seed):
                np.testing.assert_array_equal(transform.signs(dims, seed), ref.signs(dims, seed))
                for name in matrices.COMPUTED:
                    if (name == "hadamard" and dims & (dims - 1)) or (
                        name == "random" and dims > 128
                    ):
                        continue  # the spec makes one number after the other
                    made = transform.make(name, dims, seed)
                    if name == "random":
                        down = codebook_ref.random_rotation(dims, seed)
                        up = down.T
                    else:
                        down, up = ref.transform(name, dims, seed)
                    np.testing.assert_allclose(np.array(made.down), down, atol=1e-7)
                    np.testing.assert_allclose(np.array(made.up), up, atol=1e-7)
                assert transform.make("none", dims, seed) is None


def test_scales_are_taken_back_by_the_other_side():
    scale = mx.random.uniform(0.5, 2, (2, 1, 64), key=mx.random.key(0))
    for name, scales in ("srft", scale[0, 0]), ("hadamard", scale[0, 0]), ("srft", scale):
        made = transform.make(name, 64, 0).scaled(scales)
        one = np.broadcast_to(np.eye(64), made.up.shape)
        np.testing.assert_allclose(np.array(made.down @ made.up), one, atol=1e-4)


def test_words_are_in_the_order_of_mlx_quantize(subtests):
    """MLX's own kernels read our pages, so their bit order must stay ours."""
    for bits in (2, 3, 4, 8):
        for group in (32, 64):
            with subtests.test(bits=bits, group=group):
                x = mx.array(normal(1, 1, 64, 128))
                stored = affine.encode(Affine(bits, group), x, 64)
                theirs = mx.dequantize(
                    stored["codes"], stored["scale"], stored["bias"], group_size=group, bits=bits
                )
                codes = ref.unpack(np.array(stored["codes"]), bits, 128)
                scale, bias = (np.array(stored[n]).astype(np.float64) for n in ("scale", "bias"))
                spec = ref.affine_decode(codes, scale, bias, group)
                np.testing.assert_allclose(np.array(theirs.astype(mx.float32)), spec, atol=4e-3)
                assert (
                    np.abs(spec - np.array(x)).max() <= 0.51 * scale.max() + 4e-3
                )  # each in its place


def test_what_is_made_of_a_basis_goes_with_it():
    """200 updates: before, 64 bases and what was made of them stayed, those with casts 256."""
    u, seen, bytes_ = mx.random.normal((1, 2, 32, 24), key=mx.random.key(1)), [], []
    for seed in range(200):
        u = adaptive.update(u, mx.random.normal((1, 2, 8, 32), key=mx.random.key(seed)), 0.1)
        one = adaptive.transform_of(u)
        mx.eval(*(one.apply(mx.zeros((1, 2, 1, 32), mx.float16)) for _ in range(2)))
        seen.append(weakref.ref(one))
        bytes_.append(mx.get_active_memory())
    del one
    assert not any(ref() for ref in seen)
    assert bytes_[-1] <= bytes_[9] + (64 << 10)  # of 1.2 MB that they would take
