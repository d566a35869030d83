"""Clips in the quantize kernel, in the emulator with all its checks: the networks, every kind, faults."""

import mlx.core as mx
import numpy as np
from emulator import metal_kernel
from on_emulator import data, make, orthogonal, quantize_and_check, quantize_by_ops, unpack_side

from mlxkv.codec import transform
from mlxkv.codec.transform import Transform
from mlxkv.formats.quantizers import Affine
from mlxkv.metal import quantize
from mlxkv.metal.sources import ALL, read_source, resolved

SORT = """
const int row = int(thread_position_in_grid.x);
float v[N];
for (int i = 0; i < N; i++) {
  v[i] = x[row * N + i];
}
if (MERGE > 0) {
  float other[N];
  for (int i = 0; i < N; i++) {
    other[i] = y[row * N + i];
  }
  kv_merge<N>(v, other);
} else {
  kv_sort<N>(v);
}
for (int i = 0; i < N; i++) {
  out[row * N + i] = v[i];
}
"""


def network(x, y=None):
    kernel = metal_kernel(
        "network", ["x", "y"], ["out"], SORT, resolved(read_source("select.h"), ALL)
    )
    merge = int(y is not None)
    (out,) = kernel(
        inputs=[x, y if merge else x],
        template=[("N", x.shape[1]), ("MERGE", merge)],
        grid=(len(x), 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[np.float32],
    )
    return out


def test_the_networks_sort_and_merge(subtests):
    """A network that sorts all zeros and ones sorts everything; the large ones see a sample."""
    for size in (8, 64):  # which is made of the others
        with subtests.test(size=size):
            rng = np.random.default_rng(0)
            if size == 8:
                x = (np.arange(256)[:, None] >> np.arange(8)) & 1
            else:
                x = rng.random((4096, size)) < rng.random((4096, 1))
            x = x.astype(np.float32)
            np.testing.assert_array_equal(network(x), -np.sort(-x, -1))
            steps = (np.arange(size) < np.arange(size + 1)[:, None]).astype(np.float32)
            pairs = [np.repeat(steps, size + 1, 0), np.tile(steps, (size + 1, 1))]
            pairs = [np.pad(p, [(0, -len(p) % 32), (0, 0)]) for p in pairs]
            merged = -np.sort(-np.concatenate(pairs, -1), -1)[:, :size]
            np.testing.assert_array_equal(network(*pairs), merged)


def hard(dims, seed):
    """Rows of zeros, of one value, with ties at the limit, with a huge value, and others."""
    x = np.array(data(1, 2, 48, dims, seed=seed))
    x[0, 0, 1] = 0.0
    x[0, 0, 2] = -1.5
    x[0, 0, 3] = np.round(x[0, 0, 3])
    x[0, 0, 4] = np.where(np.arange(dims) % 3 > 0, 0.75, -0.75)
    x[0, 1, 9, dims - 2] = -1e6
    x[0, 1, 10, 2:] = 0.0
    x[0, 1, 11] = np.arange(dims) - dims // 3
    return mx.array(x)


def numbers(words, whole):
    """Codes, scales and biases of both sides; numbers, since of two zeros either will do."""
    split = whole.keys.words
    sides = (words[..., :split], whole.keys), (words[..., split:], whole.values)
    return [y for side in sides for y in unpack_side(*side) if y is not None]


CLIPS = (0.96, 0.92), (0.88, 1.0), (1.0, 0.5)
HEADS = (33, 80, 512)


def test_without_transform_it_is_its_plain_ops_twin(subtests):
    for dims, clips in [(64, clips) for clips in CLIPS] + [
        (n, CLIPS[i % 3]) for i, n in enumerate(HEADS)
    ]:
        with subtests.test(dims=dims, clips=clips):
            specs = Affine(2, 0, clip=clips[0]), Affine(3, 32, dims % 3 == 2, clip=clips[1])
            pair = [hard(dims, i) for i in range(2)]
            twin, whole, _ = quantize_by_ops(pair, specs)
            words = quantize.quantize_pages(
                pair, whole, make, ranks=tuple(spec.clip_rank(dims) for spec in specs)
            )
            for ours, theirs in zip(numbers(words, whole), numbers(twin, whole), strict=True):
                assert mx.array_equal(ours, theirs)


def test_behind_butterflies(subtests):
    for name, dims, dtype in [
        ("srft", 128, mx.bfloat16),
        ("hadamard", 256, mx.float16),
    ]:
        with subtests.test(name=name, dims=dims):
            pair = [data(1, 2, 90, dims, seed=i, dtype=dtype) for i in range(2)]
            pair[0][0, 1, 8] = 0.0
            made = transform.make(name, dims, 3), transform.make(name, dims, 4)
            specs = Affine(2, 64, clip=0.96), Affine(4, 0, clip=0.92)
            quantize_and_check(pair, specs, made, start=5, tokens=80)
            if dims == 128:
                symmetric = Affine(3, 32, True, clip=0.92), Affine(2, 32, clip=0.96)
                quantize_and_check(pair, symmetric, made, start=0, tokens=16)


def test_behind_a_product(subtests):
    """The share is one of the stored dims, fewer than the head's where the matrix is of low rank."""
    for dims, rank in [(80, 80), (128, 96)]:
        with subtests.test(dims=dims, rank=rank):
            q = orthogonal(dims, 0, 2)[..., :rank]
            made = Transform(mx.array(q), mx.array(q.swapaxes(-1, -2)))
            pair = [data(1, 2, 48, dims, seed=i, dtype=mx.float16) for i in range(2)]
            quantize_and_check(
                pair, (Affine(2, 0, clip=0.96), Affine(2, 32, clip=0.92)), (made, made)
            )


def test_more_than_the_lists_hold_is_clipped_before_the_kernel():
    specs = Affine(3, 64, clip=0.6), Affine(2, 64, clip=0.96)
    assert specs[0].clip_rank(256) > quantize.MAX_RANK
    made = transform.make("srft", 256, 1)
    pair = [data(1, 2, 64, 256, seed=i, dtype=mx.float16) for i in range(2)]
    quantize_and_check(pair, specs, (made, made), start=16, tokens=32)
