"""Transform coding: what the published text says of it holds for the spec."""

import itertools

import numpy as np
import pytest

from mlxkv.spec import affine, balanced
from mlxkv.spec.mixed import transform_coding as spec


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def covariance(dims, seed, spread=1.0):
    rows = normal(4 * dims, dims, seed=seed) * np.exp(spread * normal(dims, seed=seed + 1))
    mixed = rows @ np.linalg.qr(normal(dims, dims, seed=seed + 2))[0]
    return mixed.T @ mixed / len(rows)


def test_a_mean_that_all_keys_lose_changes_no_attention():
    q, k, v = (
        normal(1, heads, n, 16, seed=s) for s, (heads, n) in enumerate([(4, 5), (2, 40), (2, 40)])
    )
    mean = 30 * normal(2, 1, 16, seed=3)
    out = affine.attention(q, k, v, 0.25)
    np.testing.assert_allclose(affine.attention(q, spec.centred(k, mean), v, 0.25), out, atol=1e-12)
    # Not if a window keeps the mean, nor beside the logit of a sink.
    part = np.concatenate([k[:, :, :8], spec.centred(k, mean)[:, :, 8:]], 2)
    assert np.abs(affine.attention(q, part, v, 0.25) - out).max() > 0.1
    sinks = np.zeros(4)
    with_sinks = [affine.attention(q, x, v, 0.25, sinks=sinks) for x in (k, spec.centred(k, mean))]
    assert np.abs(with_sinks[0] - with_sinks[1]).max() > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_squared_errors_of_what_is_stored_are_errors_of_scores(seed):
    """The generalized Parseval relation of NOVA-KV's abstract."""
    noise, reads = covariance(24, seed), covariance(24, seed + 10)
    down, variances = spec.attention_map(noise, reads)
    errors = normal(50, 24, seed=seed)
    direct = np.einsum("nd,de,ne->n", errors, reads, errors)
    np.testing.assert_allclose(((errors @ down) ** 2).sum(1), direct, rtol=1e-9)
    np.testing.assert_allclose(down.T @ noise @ down, np.diag(variances), atol=1e-8 * variances[0])
    assert np.abs(down.T @ down - np.eye(24) * (down**2).sum() / 24).max() > 0.1  # not orthogonal


def test_the_map_is_the_balanced_one_but_for_a_scale_per_direction(monkeypatch):
    monkeypatch.setattr(balanced, "FLOOR", 0)
    noise, reads = covariance(32, 1), covariance(32, 2)
    down, variances = spec.attention_map(noise, reads)
    ours, sigma = balanced.balanced(noise, reads)
    np.testing.assert_allclose(variances, sigma**2, rtol=1e-6)
    np.testing.assert_allclose(down, ours * np.sqrt(sigma), atol=1e-6 * np.abs(down).max())


@pytest.mark.parametrize("dims", (32, 64, 128))
def test_groups_have_about_equal_volume(dims):
    order = spec.stratified(dims)
    assert sorted(order) == list(range(dims))
    falling = np.log2(np.exp(-np.linspace(0, 6, dims)))

    def spread(order):
        volume = falling[order].reshape(-1, spec.GROUP).sum(1)
        return volume.max() - volume.min()

    assert spread(order) < 0.3 * spread(np.arange(dims))


def test_codebooks_beat_scalar_codes_of_the_same_bits():
    """8 bits for 4 dependent numbers against 2 bits for each after its own min-max."""
    rows = normal(4000, 4) @ np.linalg.cholesky(covariance(4, 5)).T
    book = spec.codebook(rows[:3000], spec.CENTROIDS)
    assert book.shape == (256, 4)
    scale = np.ones(1000)
    codes = spec._nearest(rows[3000:], book)[0][:, None]
    back = spec.grouped_decode(codes, scale, book[None])
    mine = ((back - rows[3000:]) ** 2).mean()
    affine_codes = affine.affine_encode(rows[3000:], 2, 1000, axis="channel")
    other = ((affine.affine_decode(*affine_codes, 1000, "channel") - rows[3000:]) ** 2).mean()
    assert mine < 0.5 * other
    few = spec.codebook(rows[:100], 256)  # fewer rows than centroids: each is one
    assert spec._nearest(rows[:100], few)[1].max() < 1e-9


def test_grouped_codes_scale_with_a_token():
    books = np.stack([spec.codebook(normal(600, 4, seed=s), 16, rounds=5) for s in range(3)])
    rows = normal(20, 12, seed=9)
    codes, scale = spec.grouped_encode(rows, books)
    again, larger = spec.grouped_encode(8 * rows, books)
    np.testing.assert_array_equal(codes, again)
    np.testing.assert_array_equal(8 * scale, larger)
    back = spec.grouped_decode(codes, scale, books)
    assert 0 < ((back - rows) ** 2).mean() < 0.6 * (rows**2).mean()
    np.testing.assert_array_equal(spec.grouped_encode(np.zeros((2, 12)), books)[1], 0)


def test_fp8_keeps_two_bits_of_mantissa():
    x = np.concatenate([normal(500), [0.0, 1e-9]])
    back = spec.fp8(x)
    far = np.abs(x) > 1e-3
    assert 0.05 < (np.abs(back - x)[far] / np.abs(x)[far]).max() <= 0.125
    np.testing.assert_allclose(spec.fp8(back), back, rtol=1e-12)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    scale = np.abs(x).max() / 57344
    theirs = torch.tensor(x / scale, dtype=torch.float64).to(torch.float8_e5m2).to(torch.float64)
    np.testing.assert_allclose(back, theirs.numpy() * scale, rtol=1e-9)


def test_water_filling_spends_the_rate_where_variance_is():
    variances = np.exp(-np.linspace(0, 8, 32))
    for rate in (0.5, 1.0, 2.0, 4.0):
        level, bits = spec.water_level(variances, rate)
        assert bits.mean() == pytest.approx(rate)
        errors = variances * 4.0**-bits
        np.testing.assert_allclose(errors[bits > 0], level)
        assert (variances[bits == 0] <= level * (1 + 1e-12)).all()
        assert errors.sum() < (variances * 4.0**-rate).sum()


def test_whole_bits_are_the_best_there_are():
    variances, theory = np.array([8.0, 3.0, 1.0, 0.2]), 4.0 ** -np.arange(spec.MOST + 1)
    for total in range(9):
        bits = spec.water_filling(variances, total, theory)
        assert bits.sum() == total
        least = min(
            (variances * 4.0 ** -np.array(all_bits)).sum()
            for all_bits in itertools.product(range(total + 1), repeat=4)
            if sum(all_bits) == total
        )
        assert (variances * theory[bits]).sum() == pytest.approx(least)
    assert spec.water_filling(variances, 4 * spec.MOST, theory).tolist() == [spec.MOST] * 4


@pytest.mark.parametrize("count", (0, 1, 2, 5, 8))
def test_levels_err_by_half_a_cell_at_most(count):
    x, bits = normal(40, 6), np.array([count, 3, 2, 0, count, 4])
    codes, scale = spec.levels_encode(x, bits)
    back = spec.levels_decode(codes, scale, bits)
    assert (codes < 2.0**bits).all() and (codes[:, bits == 0] == 0).all()
    room = scale[:, None] * 2.0**-bits * 1.01
    assert (np.abs(back - x)[:, bits > 0] <= room[:, bits > 0] + 1e-3).all()
    assert (back[:, bits == 0] == 0).all()


@pytest.mark.parametrize("power", (0.0, 0.5, 1.0))
def test_whitening_flattens_keys_and_sharpens_queries(power):
    noise, reads = covariance(32, 1), covariance(32, 2)
    down, energy = spec.partly_whitened(noise, reads, power)
    up = np.linalg.inv(down)
    np.testing.assert_allclose(up @ reads @ up.T, np.diag(energy), atol=1e-8 * energy[0])
    stored = np.linalg.eigvalsh(down.T @ noise @ down)
    usual = np.linalg.eigvalsh(noise)
    assert np.log(stored[-1] / stored[0]) == pytest.approx(
        (1 - power) * np.log(usual[-1] / usual[0]), abs=1e-6
    )
    assert (np.diff(energy) <= 1e-9).all()
