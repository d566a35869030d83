"""Balanced transforms: the theorem, the invariance, and the product against the spec."""

import numpy as np
import pytest

from mlxkv.formats import matrices
from mlxkv.formats.calibration import balance
from mlxkv.spec import affine
from mlxkv.spec import balanced as spec


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def covariance(dims, seed, spread=1.0):
    rows = normal(3 * dims, dims, seed=seed) * np.exp(spread * normal(dims, seed=seed + 1))
    rotation = matrices.random_basis(1, dims, seed)[0]
    return rotation.T @ rows.T @ rows @ rotation / len(rows)


def unfloored(noise, sensitivity, monkeypatch):
    monkeypatch.setattr(spec, "FLOOR", 0)
    return spec.balanced(noise, sensitivity)


def test_no_invertible_map_does_better(subtests, monkeypatch):
    for seed in range(4):
        with subtests.test(seed=seed):
            dims = (2, 8, 33, 64)[seed % 4]
            noise, reads = covariance(dims, seed), covariance(dims, seed + 20)
            down, sigma = unfloored(noise, reads, monkeypatch)
            least = sigma.sum() ** 2
            assert spec.cost(down, noise, reads) == pytest.approx(least)
            assert spec.cost(3 * down @ matrices.random_basis(1, dims, 5)[0], noise, reads) == (
                pytest.approx(least)
            )
            for other in range(40):
                far = normal(dims, dims, seed=100 * seed + other)
                near = down @ (np.eye(dims) + 1e-3 * far)
                for rotation in (far, near, matrices.random_basis(1, dims, other)[0]):
                    assert spec.cost(rotation, noise, reads) >= least * (1 - 1e-12)
            # Nearby maps are strictly worse, to second order: a minimum, not a plateau.
            assert spec.cost(down @ np.diag(1 + 0.1 * normal(dims)), noise, reads) > least * (
                1 + 1e-6
            )


def test_the_output_moment_is_the_energy_of_errors_behind_the_projection():
    w, e = normal(6, 8, 20), normal(3, 8, seed=1)
    found = spec.output_moment(w, 3)
    for g in range(3):
        brute = sum(((e[g] @ w[h]) ** 2).sum() for h in (2 * g, 2 * g + 1))
        assert e[g] @ found[g] @ e[g] == pytest.approx(brute)


def test_the_product_makes_the_pair_of_the_spec(subtests):
    for dims in (16, 40, 128):
        with subtests.test(dims=dims):
            noise = np.stack([covariance(dims, s) for s in (1, 2)])
            reads = np.stack([covariance(dims, s) for s in (3, 4)])
            down, sigma, lacking = balance.balance(noise, reads)
            assert lacking == 0
            there, back = balance.mixed(down)
            for g in range(2):
                t, s = spec.balanced(spec.regular(noise[g]), spec.regular(reads[g]))
                np.testing.assert_allclose(sigma[g], s, rtol=1e-9)
                for ours, theirs in zip((there[g], back[g]), spec.pair(t), strict=True):
                    np.testing.assert_allclose(ours, theirs, atol=1e-7 * np.abs(theirs).max())
            np.testing.assert_allclose(
                there @ back, np.broadcast_to(np.eye(dims), there.shape), atol=1e-9
            )


def test_moments_without_full_rank_still_give_a_sound_pair(subtests):
    for rank in (1, 5, 63):
        with subtests.test(rank=rank):
            rows = normal(rank, 64) * np.exp(2 * normal(64, seed=1))
            rows[:, 7] = 0  # a channel without variance
            poor, full = rows.T @ rows / rank, covariance(64, 4)
            for noise, reads in ((poor, full), (full, poor), (poor, poor)):
                down, sigma, lacking = balance.balance(noise[None], reads[None])
                assert lacking >= 64 - rank and (sigma > 0).all()
                assert balance.fault(down.astype(np.float32)) is None


def test_faults_are_named():
    eye = np.eye(16, dtype=np.float32)[None]
    assert balance.fault(eye) is None
    flat = eye.copy()
    flat[0, 3, 3] = 1e-8
    assert "condition" in balance.fault(flat)
    flat[0, 3, 3] = 0
    assert "condition" in balance.fault(flat)


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
