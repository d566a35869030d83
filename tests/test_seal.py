"""The seal kernel in the emulator, with all its checks: transforms, formats, dtypes, slices."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from on_emulator import make

from mlxkv import kernels, packing, records, transform
from mlxkv import reference as ref
from mlxkv.config import Affine
from mlxkv.quantizers import affine
from mlxkv.transform import Transform

NEAR = 1e-3  # of a code from where rounding turns
INT8, INT4, INT3, INT2 = (
    Affine(8, 64),
    Affine(4, 32, symmetric=True),
    Affine(3, 64),
    Affine(2, 0, symmetric=True),
)


def data(*shape, seed=0, dtype=mx.float32):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    x[..., 3] *= 6
    return mx.array(x.astype(np.float32)).astype(dtype)


def layout(specs, dims):
    keys, values = (
        records.layout(s, d, 64, i == 0) for i, (s, d) in enumerate(zip(specs, dims, strict=True))
    )
    return kernels.RecordLayout(keys, values)


def check(words, x, spec, at, down=None):
    """The side `at` of records against the spec's codes of x @ down, rounding ties aside."""
    codes, scale, bias = (
        None if y is None else np.array(y) for y in records.unpack_side(words, at)
    )
    stored = np.array(x.astype(mx.float32), np.float64)
    if down is not None:
        stored = stored @ np.array(down, np.float64)
    stored = ref.clip_rows(stored, spec.clip)
    group = spec.group_size(at.dims, 64)
    want, want_scale, want_bias = ref.affine_encode(stored, spec.bits, group, spec.symmetric)
    # Scales and biases: float16 of values that differ in the last bits of a float32.
    for ours, theirs in ((scale, want_scale), (bias, want_bias)):
        if ours is not None:
            off = np.abs(ours - theirs)
            assert (off <= np.maximum(np.abs(theirs), 1e-4) / 1000).all()
            assert (off > 0).mean() < 0.01
    # Codes by our own scales, so that each stands for itself.
    start = -(2 ** (spec.bits - 1)) * scale.astype(float) if bias is None else bias.astype(float)
    wide = [np.repeat(y, group, -1)[..., : at.dims] for y in (start, scale.astype(float))]
    exact = (stored - wide[0]) / np.where(wide[1] > 0, wide[1], 1)
    low, top = (1 if spec.symmetric else 0), 2**spec.bits - 1
    nearest = np.clip(np.rint(exact), low, top)
    if spec.symmetric:
        nearest = np.where(wide[1] > 0, nearest, 2 ** (spec.bits - 1))
    wrong = codes != nearest
    tie = np.abs(np.abs(exact - np.rint(exact)) - 0.5) < NEAR
    assert not (wrong & ~tie).any()
    assert wrong.mean() < 2e-3
    assert (codes != want).mean() < 2e-2


def seal_and_check(pair, specs, transforms, start=0, tokens=None):
    downs = [None if t is None else t.down for t in transforms]
    dims = [x.shape[3] if d is None else d.shape[-1] for x, d in zip(pair, downs, strict=True)]
    whole = layout(specs, dims)
    ranks = tuple(spec.clip_rank(n) for spec, n in zip(specs, dims, strict=True))
    words = kernels.seal(pair, whole, make, transforms, start, tokens, ranks)
    stop = pair[0].shape[2] if tokens is None else start + tokens
    assert words.shape == (*pair[0].shape[:2], (stop - start) // 16, whole.words)
    split = whole.keys.words
    sides = (words[..., :split], whole.keys), (words[..., split:], whole.values)
    for x, spec, down, (side, at) in zip(pair, specs, downs, sides, strict=True):
        check(side, x[:, :, start:stop], spec, at, down)
    return words


@pytest.mark.parametrize(
    ("dims", "bits", "group", "symmetric"),
    [
        (64, 4, 32, True),
        (80, 3, 64, False),
        (96, 8, 0, False),
        (128, 2, 32, False),
        (128, 4, 64, False),
        (256, 3, 64, False),
        (512, 4, 64, False),
        (40, 4, 0, True),
        (33, 8, 0, False),
        (66, 4, 32, True),
    ],
)
def test_without_transform_it_is_its_plain_ops_twin_to_the_bit(dims, bits, group, symmetric):
    spec = Affine(bits, group, symmetric)
    pair = [data(1, 2, 48, dims, seed=i) for i in range(2)]
    pair[0][0, 0, 5] = 0.0  # groups of zeros, and of one value
    pair[1][0, 1, 7] = 1000.3
    whole = layout((spec, spec), (dims, dims))
    twins = []
    for x, at in zip(pair, (whole.keys, whole.values), strict=True):
        stored = affine.encode(spec, x, 16)
        codes = packing.unpack(stored["codes"], bits, dims)
        twins.append(records.pack_side(codes, stored["scale"], stored.get("bias"), at))
    assert mx.array_equal(kernels.seal(pair, whole, make), mx.concatenate(twins, -1))


@pytest.mark.parametrize("dtype", (mx.float32, mx.float16, mx.bfloat16))
@pytest.mark.parametrize("dims", (64, 128, 256, 512))
@pytest.mark.parametrize("name", ("hadamard", "srft"))
def test_butterflies_give_what_the_matrix_of_the_spec_gives(name, dims, dtype):
    pair = [data(2, 2, 32, dims, seed=i, dtype=dtype) for i in range(2)]
    pair[0][1, 0, 3] = 0.0
    specs = {mx.float32: (INT8, INT4), mx.float16: (INT3, INT8), mx.bfloat16: (INT4, INT2)}[dtype]
    transforms = transform.make(name, dims, 3), transform.make(name, dims, 4)
    seal_and_check(pair, specs, transforms)
    down = ref.transform(name, dims, 3)[0]
    np.testing.assert_allclose(np.array(transforms[0].down), down, atol=1e-7)


@pytest.mark.parametrize("spec", (INT8, INT4))
def test_a_token_a_hundred_times_larger_leaves_the_other_of_its_pair_alone(spec):
    """SRFT transforms tokens by pairs; of the larger one 1e-7 is left in the other."""
    pair = [data(1, 1, 64, 128, seed=i) for i in range(2)]
    factor = np.ones((64, 1), np.float32)
    factor[8::16] = factor[1::16] = 100.0  # with tokens 0: in the pairs of keys, and of values
    made = transform.make("srft", 128, 1)
    zeros = factor.copy()
    zeros[::16] = 0.0
    for by in (factor, zeros):
        seal_and_check([x * mx.array(by) for x in pair], (spec, spec), (made, made))


def test_impulses_come_out_as_the_rows_of_the_matrix():
    """Each entry of the matrix, seen through 8 bits: a fault in one twiddle cannot hide."""
    for name in ("hadamard", "srft"):
        for dims in (64, 256):
            x = mx.eye(dims)[None, None]
            pair, made = (x, x), transform.make(name, dims, 1)
            seal_and_check(pair, (INT8, INT8), (made, made))


@pytest.mark.parametrize("entry", (5, 128 + 2 * 6, 128 + 2 * 30 + 1))
def test_a_wrong_table_is_noticed(entry):
    good = transform.make("srft", 128, 0)
    table = np.array(good.table)
    table[entry] *= -1  # a sign; a twiddle of the butterflies, one of the last step
    bad = dataclasses.replace(good, table=mx.array(table))
    pair = data(1, 1, 16, 128), data(1, 1, 16, 128, seed=1)
    seal_and_check(pair, (INT8, INT8), (good, good))
    for transforms in ((bad, good), (good, bad), (None, good)):
        whole = layout((INT8, INT8), (128, 128))
        words = kernels.seal(pair, whole, make, transforms)
        with pytest.raises(AssertionError):
            check(words[..., : whole.keys.words], pair[0], INT8, whole.keys, good.down)
            check(words[..., whole.keys.words :], pair[1], INT8, whole.values, good.down)


def orthogonal(dims, seed, *lead):
    rng = np.random.default_rng(seed)
    return np.linalg.qr(rng.standard_normal((*lead, dims, dims)))[0].astype(np.float32)


def matrix(dims, heads, rank=None, seed=0):
    q = orthogonal(dims, seed, *([heads] if heads else []))[..., :rank]
    return Transform(mx.array(q), mx.array(q.swapaxes(-1, -2)))


@pytest.mark.parametrize("dtype", (mx.float32, mx.float16, mx.bfloat16))
@pytest.mark.parametrize(("dims", "heads"), [(64, 2), (96, 0), (128, 2), (192, 2), (256, 0)])
def test_a_few_tokens_are_multiplied_by_a_square_matrix_in_the_kernel(dims, heads, dtype):
    made, other = matrix(dims, heads), matrix(dims, 2, seed=1)
    assert kernels.seal_kind(made, dims, 64) == kernels.DENSE
    assert kernels.seal_kind(made, dims, 4096) is None
    pair = [data(2, 2, 48, dims, seed=i, dtype=dtype) for i in range(2)]
    specs = Affine(2, 64, clip=0.9), Affine(3, 32, True)
    seal_and_check(pair, specs, (made, other), start=16, tokens=32)
    seal_and_check(pair, specs[::-1], (other, None))


def test_the_product_in_the_kernel_is_that_of_plain_ops(monkeypatch):
    made, pair = matrix(128, 3), [data(1, 3, 32, 128, seed=i) for i in range(2)]
    whole = layout((INT8, INT8), (128, 128))
    one = kernels.seal(pair, whole, make, (made, made))
    monkeypatch.setattr(kernels, "DENSE_TOKENS", 0)
    other = kernels.seal(pair, whole, make, (made, made))
    assert float((one != other).mean()) < 0.01  # words that hold a tie, or a scale
    wrong = dataclasses.replace(made, down=made.down[::-1])
    monkeypatch.undo()
    words = kernels.seal(pair, whole, make, (wrong, made))
    with pytest.raises(AssertionError):
        check(words[..., : whole.keys.words], pair[0], INT8, whole.keys, made.down)


@pytest.mark.parametrize(
    ("dims", "rank", "heads"), [(80, 80, 0), (128, 96, 2), (96, 70, 0), (33, 33, 2), (64, 40, 0)]
)
def test_other_matrices_come_before_the_kernel(dims, rank, heads):
    made = matrix(dims, heads, rank)
    assert kernels.seal_kind(made, dims, 64) is None
    pair = [data(2, 2, 64, dims, seed=i, dtype=mx.float16) for i in range(2)]
    seal_and_check(pair, (Affine(4, 0), Affine(8, 32, True)), (made, None), start=16, tokens=32)
    seal_and_check(pair, (Affine(4, 0), Affine(3, 64)), (None, made))


def test_srft_of_dims_without_butterflies_is_a_matrix():
    for dims in (80, 96, 192):
        made = transform.make("srft", dims, 0)
        assert kernels.fast_kind(made, dims) is None
        pair = data(1, 2, 32, dims), data(1, 2, 32, dims, seed=1)
        seal_and_check(pair, (INT8, INT4), (made, made))
    made = transform.make("srft", 64, 0)
    assert kernels.fast_kind(made, 64) == 2
    assert kernels.fast_kind(made.scaled(mx.ones(64)), 64) is None


def test_sides_may_differ_in_everything():
    pair = data(2, 3, 80, 64, dtype=mx.float16), data(2, 3, 80, 256, seed=1)
    transforms = transform.make("srft", 64, 7), transform.make("hadamard", 256, 8)
    whole = seal_and_check(pair, (INT8, INT2), transforms)
    part = seal_and_check(pair, (INT8, INT2), transforms, start=16, tokens=48)
    assert mx.array_equal(part, whole[:, :, 1:4])
    unaligned = seal_and_check(pair, (INT8, INT2), transforms, start=5, tokens=64)
    shifted = kernels.seal(
        [x[:, :, 5:69] for x in pair], layout((INT8, INT2), (64, 256)), make, transforms
    )
    assert mx.array_equal(unaligned, shifted)


def test_large_values_are_kept_within_float16():
    pair = [data(1, 1, 16, 64, seed=i) * 1e6 for i in range(2)]
    for spec in (INT4, INT8):
        seal_and_check(pair, (spec, spec), (None, None))
