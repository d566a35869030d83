"""The quantize kernel in the emulator, with all its checks: transforms, formats, dtypes, slices."""

import mlx.core as mx
import numpy as np
from on_emulator import (
    INT2,
    INT3,
    INT4,
    INT8,
    data,
    layout,
    make,
    orthogonal,
    quantize_and_check,
    quantize_by_ops,
)

from mlxkv.codec import transform
from mlxkv.codec.transform import Transform
from mlxkv.formats.quantizers import Affine
from mlxkv.metal import quantize
from mlxkv.spec import affine as ref


def test_without_transform_it_is_its_plain_ops_twin_to_the_bit(subtests):
    for dims, bits, group, symmetric in [
        (64, 4, 32, True),
        (80, 3, 64, False),
        (512, 2, 64, False),
        (33, 8, 0, False),
        (66, 4, 32, True),
        (96, 3, 32, True),  # the last of groups that share words by twos
        (256, 4, 192, False),  # blocks that are read again, and a last group that is not whole
    ]:
        with subtests.test(dims=dims, bits=bits, group=group):
            spec = Affine(bits, group, symmetric)
            pair = [data(1, 2, 48, dims, seed=i) for i in range(2)]
            pair[0][0, 0, 5] = 0.0  # groups of zeros, and of one value
            pair[1][0, 1, 7] = 1000.3
            twin, whole, _ = quantize_by_ops(pair, (spec, spec))
            assert mx.array_equal(quantize.quantize_pages(pair, whole, make), twin)


def test_butterflies_give_what_the_matrix_of_the_spec_gives(subtests):
    for name, sizes in {
        "hadamard": [(64, mx.float32), (256, mx.float16)],
        "srft": [(128, mx.bfloat16), (512, mx.float32)],
    }.items():
        for dims, dtype in sizes:
            with subtests.test(dims=dims, dtype=dtype, name=name):
                pair = [data(2, 2, 32, dims, seed=i, dtype=dtype) for i in range(2)]
                pair[0][1, 0, 3] = 0.0
                specs = {
                    mx.float32: (INT8, INT4),
                    mx.float16: (INT3, INT8),
                    mx.bfloat16: (INT4, INT2),
                }[dtype]
                transforms = transform.make(name, dims, 3), transform.make(name, dims, 4)
                quantize_and_check(pair, specs, transforms)
                down = ref.transform(name, dims, 3)[0]
                np.testing.assert_allclose(np.array(transforms[0].down), down, atol=1e-7)


def test_scales_per_channel_follow_the_butterflies(subtests):
    """SRFT paper, section 7.1: x lambda between the transform and the abs-max of a group, in one dispatch."""
    for dims, dtype in [(64, mx.float16), (512, mx.bfloat16)]:
        with subtests.test(dims=dims, dtype=dtype):
            pair = [data(2, 2, 32, dims, seed=i, dtype=dtype) for i in range(2)]
            pair[0][1, 0, 3] = 0.0
            scales = [2.0 ** np.random.default_rng(i).uniform(-4, 4, dims) for i in range(2)]
            made = [
                transform.make("srft", dims, 0).scaled(mx.array(x.astype(np.float32)))
                for x in scales
            ]
            assert [quantize.quantize_kind(one, dims, 4096) for one in made] == [4, 4]
            quantize_and_check(pair, (INT4, Affine(3, 32, True)), made)
            quantize_and_check(
                pair, (Affine(2, 64, clip=0.9), INT8), (made[1], None), start=16, tokens=16
            )
            for one, scale in zip(made, scales, strict=True):
                down, up = ref.scaled(*ref.transform("srft", dims), scale)
                np.testing.assert_allclose(np.array(one.down), down, rtol=1e-6, atol=1e-6)
                np.testing.assert_allclose(np.array(one.up), up, rtol=1e-6, atol=1e-6)


def test_a_token_a_hundred_times_larger_leaves_the_other_of_its_pair_alone():
    """SRFT transforms tokens by pairs; of the larger one 1e-7 is left in the other."""
    pair = [data(1, 1, 64, 128, seed=i) for i in range(2)]
    factor = np.ones((64, 1), np.float32)
    factor[8::16] = factor[1::16] = 100.0  # with tokens 0: in the pairs of keys, and of values
    made = transform.make("srft", 128, 1)
    zeros = factor.copy()
    zeros[::16] = 0.0
    for by in (factor, zeros):
        quantize_and_check([x * mx.array(by) for x in pair], (INT8, INT8), (made, made))


def matrix(dims, heads, rank=None, seed=0):
    q = orthogonal(dims, seed, *([heads] if heads else []))[..., :rank]
    return Transform(mx.array(q), mx.array(q.swapaxes(-1, -2)))


def test_a_few_tokens_are_multiplied_by_a_square_matrix_in_the_kernel():
    made, other = matrix(256, 2), matrix(256, 2, seed=1)
    assert quantize.quantize_kind(made, 256, 64) == quantize.DENSE
    assert quantize.quantize_kind(made, 256, 4096) is None
    pair = [data(2, 2, 48, 256, seed=i, dtype=mx.float16) for i in range(2)]
    specs = Affine(2, 64, clip=0.9), Affine(3, 32, True)
    quantize_and_check(pair, specs, (made, other), start=16, tokens=32)
    quantize_and_check(pair, specs[::-1], (other, None))


def test_other_matrices_come_before_the_kernel(subtests):
    for dims, rank, heads in [(80, 80, 0), (128, 96, 2)]:
        with subtests.test(dims=dims, rank=rank, heads=heads):
            made = matrix(dims, heads, rank)
            assert quantize.quantize_kind(made, dims, 64) is None
            pair = [data(2, 2, 64, dims, seed=i, dtype=mx.float16) for i in range(2)]
            quantize_and_check(
                pair, (Affine(4, 0), Affine(8, 32, True)), (made, None), start=16, tokens=32
            )
            quantize_and_check(pair, (Affine(4, 0), Affine(3, 64)), (None, made))


def test_srft_of_dims_without_butterflies_is_a_matrix():
    made = transform.make("srft", 96, 0)
    assert quantize.fast_kind(made, 96) is None
    pair = data(1, 2, 32, 96), data(1, 2, 32, 96, seed=1)
    quantize_and_check(pair, (INT8, INT4), (made, made))
    made = transform.make("srft", 64, 0)
    assert quantize.fast_kind(made, 64) == 2
    assert quantize.fast_kind(made.scaled(mx.ones(64)), 64) == 4
    assert quantize.fast_kind(made.scaled(mx.ones((2, 1, 64))), 64) is None


def test_sides_may_differ_in_everything():
    pair = data(2, 3, 80, 64, dtype=mx.float16), data(2, 3, 80, 256, seed=1)
    transforms = transform.make("srft", 64, 7), transform.make("hadamard", 256, 8)
    whole = quantize_and_check(pair, (INT8, INT2), transforms)
    part = quantize_and_check(pair, (INT8, INT2), transforms, start=16, tokens=48)
    assert mx.array_equal(part, whole[:, :, 1:4])
    unaligned = quantize_and_check(pair, (INT8, INT2), transforms, start=5, tokens=64)
    shifted = quantize.quantize_pages(
        [x[:, :, 5:69] for x in pair], layout((INT8, INT2), (64, 256)), make, transforms
    )
    assert mx.array_equal(unaligned, shifted)


def test_large_values_are_kept_within_float16():
    pair = [data(1, 1, 16, 64, seed=i) * 1e6 for i in range(2)]
    for spec in (INT4, INT8):
        quantize_and_check(pair, (spec, spec), (None, None))
