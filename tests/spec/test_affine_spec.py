"""Properties of transforms, affine codes, packing and attention, from the papers."""

import numpy as np

from mlxkv.spec import affine as ref


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_srft_equals_the_definition_by_the_dft_sum():
    dims = 10
    x = data(dims)
    bins = np.arange(dims // 2 + 1)[:, None]
    kernel = np.exp(-2j * np.pi * bins * np.arange(dims) / dims)
    y = kernel @ (x * ref.signs(dims, 0)) / np.sqrt(dims)
    middle = np.stack([y[1:-1].real, y[1:-1].imag], -1).ravel() * np.sqrt(2)
    expected = np.concatenate([[y[0].real, y[-1].real], middle])
    np.testing.assert_allclose(ref.srft(x, 0), expected, atol=1e-14)


def test_hadamard_is_orthonormal_and_flat():
    h = ref.hadamard(64, 5)
    np.testing.assert_allclose(h @ h.T, np.eye(64), atol=1e-13)
    np.testing.assert_allclose(np.abs(h), 1 / np.sqrt(64))


def test_affine_error_is_at_most_half_a_step(subtests):
    for bits in (2, 3, 4, 8):
        for symmetric in (False, True):
            for axis, group in (("token", 16), ("token", 64), ("channel", 32)):
                with subtests.test(bits=bits, symmetric=symmetric, axis=axis, group=group):
                    x = data(16, 64, 64)
                    codes, scale, bias = ref.affine_encode(x, bits, group, symmetric, axis)
                    decoded = ref.affine_decode(codes, scale, bias, group, axis)
                    steps = scale.repeat(group, -1 if axis == "token" else -2)
                    # float16 scales can fall short of the range by 2^-11 of the largest value
                    assert np.all(np.abs(decoded - x) <= steps * 0.5 + np.abs(x).max() * 2**-10)
                    assert codes.max() <= 2**bits - 1
                    assert codes.min() >= (1 if symmetric else 0)
                    assert len(np.unique(codes)) == 2**bits - (1 if symmetric else 0)


def test_packing_is_a_little_endian_stream():
    codes = np.array([[1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]], np.uint8)
    stream = sum(int(c) << (3 * i) for i, c in enumerate(codes[0]))
    assert ref.pack(codes, 3).tolist() == [[stream & 0xFFFFFFFF, stream >> 32]]


def test_split_quantizes_as_few_pages_as_fit():
    assert ref.split(100, 16, 64, 64) == (16, 0)
    assert ref.split(144, 16, 64, 64) == (16, 0)
    assert ref.split(145, 16, 64, 64) == (16, 1)
    assert ref.split(208, 16, 64, 64) == (16, 1)
    assert ref.split(209, 16, 64, 64) == (16, 2)
    assert ref.split(10, 16, 64, 64) == (10, 0)


def test_attention_sinks_take_probability_and_give_nothing():
    q, k, v = data(1, 2, 1, 8), data(1, 1, 5, 8), np.ones((1, 1, 5, 8))
    out = ref.attention(q, k, v, 0.3, sinks=np.array([0.0, 50.0]))
    assert 0 < out[0, 0].max() < 1
    assert out[0, 1].max() < 1e-12
