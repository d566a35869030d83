"""Properties of transforms, affine codes, packing and attention, from the papers."""

import numpy as np

from mlxkv.spec import affine as ref

EVEN = (64, 80, 192, 512)


def data(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_srft_is_orthonormal_with_an_exact_inverse(subtests):
    for dims in EVEN:
        with subtests.test(dims=dims):
            x, y = data(9, dims), data(9, dims, seed=1)
            fx, fy = ref.srft(x, 3), ref.srft(y, 3)
            np.testing.assert_allclose(ref.srft_inverse(fx, 3), x, atol=1e-13)
            np.testing.assert_allclose((fx * fy).sum(-1), (x * y).sum(-1), atol=1e-12)  # Parseval
            down, up = ref.transform("srft", dims, 3)
            np.testing.assert_allclose(x @ down, fx, atol=1e-12)
            np.testing.assert_allclose(down @ up, np.eye(dims), atol=1e-13)


def test_srft_equals_the_definition_by_the_dft_sum():
    dims = 10
    x = data(dims)
    bins = np.arange(dims // 2 + 1)[:, None]
    kernel = np.exp(-2j * np.pi * bins * np.arange(dims) / dims)
    y = kernel @ (x * ref.signs(dims, 0)) / np.sqrt(dims)
    middle = np.stack([y[1:-1].real, y[1:-1].imag], -1).ravel() * np.sqrt(2)
    expected = np.concatenate([[y[0].real, y[-1].real], middle])
    np.testing.assert_allclose(ref.srft(x, 0), expected, atol=1e-14)


def test_hadamard_is_orthonormal_and_flat(subtests):
    for dims in (64, 512):
        with subtests.test(dims=dims):
            h = ref.hadamard(dims, 5)
            np.testing.assert_allclose(h @ h.T, np.eye(dims), atol=1e-13)
            np.testing.assert_allclose(np.abs(h), 1 / np.sqrt(dims))


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


def test_affine_keeps_constant_and_zero_groups():
    x = np.stack([np.zeros(32), np.full(32, 1.5), np.full(32, -2.0)])[None]
    for symmetric in (False, True):
        for bits in (2, 4, 8):
            codes, scale, bias = ref.affine_encode(x, bits, 32, symmetric)
            error = ref.affine_decode(codes, scale, bias, 32) - x
            assert np.abs(error).max() < 2e-3


def test_affine_takes_values_beyond_float16():
    x = np.linspace(-1e6, 1e6, 64)[None]
    for symmetric in (False, True):
        codes, scale, bias = ref.affine_encode(x, 4, 32, symmetric)
        assert np.isfinite(ref.affine_decode(codes, scale, bias, 32)).all()


def test_a_short_last_group_has_a_scale_of_its_own():
    x = data(3, 80)
    codes, scale, bias = ref.affine_encode(x, 4, 64)
    assert scale.shape == (3, 2)
    for part, g in ((slice(0, 64), 0), (slice(64, 80), 1)):
        c, s, b = ref.affine_encode(x[:, part], 4, part.stop - part.start)
        np.testing.assert_array_equal(c, codes[:, part])
        np.testing.assert_array_equal(s[:, 0], scale[:, g])
        np.testing.assert_array_equal(b[:, 0], bias[:, g])


def test_packing_round_trip_and_size(subtests):
    for bits in (2, 3, 4, 8):
        for dims in (16, 31, 80, 127, 128):
            with subtests.test(bits=bits, dims=dims):
                codes = np.random.default_rng(0).integers(0, 2**bits, (3, dims), dtype=np.uint8)
                words = ref.pack(codes, bits)
                assert words.shape == (3, -(-dims * bits // 32))
                np.testing.assert_array_equal(ref.unpack(words, bits, dims), codes)


def test_packing_is_a_little_endian_stream():
    codes = np.array([[1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]], np.uint8)
    stream = sum(int(c) << (3 * i) for i, c in enumerate(codes[0]))
    assert ref.pack(codes, 3).tolist() == [[stream & 0xFFFFFFFF, stream >> 32]]


def test_split_seals_as_few_pages_as_fit():
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


def test_window_mask_is_the_causal_mask_cut():
    mask = ref.causal_mask(2, 6, window=3)
    assert mask.astype(int).tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
