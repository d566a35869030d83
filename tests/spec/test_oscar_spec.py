"""Calibrated rotations: brute force, the theorem, and the product against the spec."""

import numpy as np
import pytest

from mlxkv.formats import matrices
from mlxkv.spec import affine as ref
from mlxkv.spec import oscar as spec

POWERS, OTHERS = (16, 128), (40, 96)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def covariance(dims, seed=0, spread=1.0):
    rows = normal(4 * dims, dims, seed=seed) * np.exp(spread * normal(dims, seed=seed + 1))
    return rows.T @ rows / len(rows)


def test_key_target_sums_over_all_query_heads_of_a_kv_head():
    q = normal(2, 6, 5, 8)
    target = spec.key_target(q, 2)
    for g in range(2):
        rows = [q[b, h, i] for b in range(2) for h in range(3 * g, 3 * g + 3) for i in range(5)]
        brute = sum(np.outer(row, row) for row in rows) / len(rows)
        np.testing.assert_allclose(target[g], brute, atol=1e-12)


def test_value_target_is_the_second_moment_of_attention_outputs(subtests):
    """V^T S^T S V = (S V)^T (S V), token by token, causal, with sinks in the softmax."""
    for sinks in (None, normal(4, seed=9)):
        with subtests.test(sinks=sinks):
            q, k, v = normal(1, 4, 9, 16), normal(1, 2, 9, 16, seed=1), normal(1, 2, 9, 12, seed=2)
            mask = ref.causal_mask(9, 9)
            target = spec.value_target(q, k, v, 0.3, mask, sinks)
            brute = np.zeros((2, 12, 12))
            for h in range(4):
                for i in range(9):
                    s = np.exp(0.3 * q[0, h, i] @ k[0, h // 2, : i + 1].T)
                    s = s / (s.sum() + (0 if sinks is None else np.exp(sinks[h])))
                    out = s @ v[0, h // 2, : i + 1]
                    brute[h // 2] += np.outer(out, out) / 18
            np.testing.assert_allclose(target, brute, atol=1e-12)


def test_the_released_value_target_weighs_rows_by_their_scores():
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 5, 8, seed=1), normal(2, 2, 5, 6, seed=2)
    target = spec.released_value_target(q, k, v)
    for g in range(2):
        own = [q[b, h, i] for b in range(2) for h in (2 * g, 2 * g + 1) for i in range(5)]
        rows = [(k[b, g, t], v[b, g, t]) for b in range(2) for t in range(5)]
        weights = [sum((key @ query) ** 2 for query in own) for key, _ in rows]
        brute = sum(w * np.outer(x, x) for w, (_, x) in zip(weights, rows, strict=True))
        np.testing.assert_allclose(target[g], brute / sum(weights), atol=1e-12)


def test_the_eigenbasis_minimises_the_frozen_error(subtests):
    """Theorem 1 (A.6): against variances ordered the other way round no orthogonal basis has a lower surrogate, be
    it random, near the best, a swap of two vectors, a Hadamard matrix, or no rotation at all."""
    for seed in range(8):
        with subtests.test(seed=seed):
            dims = (4, 16, 33, 64)[seed % 4]
            target = covariance(dims, seed)
            variances = np.sort(np.exp(normal(dims, seed=seed + 50)))[::-1]
            values, basis = spec.eigenbasis(target)
            best = spec.frozen_error(target, basis, variances)
            np.testing.assert_allclose(best, values @ variances)
            others = [np.eye(dims), spec.mixing(dims) if dims % 2 == 0 else spec.waves(dims)]
            for i in range(40):
                near = np.linalg.qr(np.eye(dims) + 1e-3 * normal(dims, dims, seed=i))[0]
                swap = basis.copy()
                swap[:, [i % dims, (i + 1) % dims]] = swap[:, [(i + 1) % dims, i % dims]]
                random = matrices.random_basis(1, dims, 100 * seed + i)[0]
                others += [random, basis @ near, swap, basis @ others[1]]
            errors = [spec.frozen_error(target, other, variances) for other in others]
            assert best <= min(errors) * (1 + 1e-12)
            assert min(errors[2:]) < max(errors)  # they differ: the surrogate is not a constant


def test_four_levels_are_those_of_lloyd_and_max():
    """Each centroid is the mean of its cell, each boundary the middle of two centroids, to what is printed."""
    x = np.linspace(-8, 8, 400_001)
    density = np.exp(-(x**2) / 2)
    ends = [-8, -spec.CUT, 0, spec.CUT, 8]
    for level, low, high in zip(spec.CENTROIDS, ends, ends[1:], strict=False):
        cell = (x >= low) & (x < high)
        assert abs((x * density)[cell].sum() / density[cell].sum() - level) < 1e-3
    assert abs(spec.CENTROIDS[2:].mean() - spec.CUT) < 1e-3
    rows = 3 + 2 * normal(50, 128)
    scale, zero = spec.OUTER * 2 / 3 * 1.16 * np.sqrt(rows.var(-1) + 1e-8), rows.mean(-1)
    got = (spec.four_levels(rows) - zero[:, None]) / scale[:, None] + 1.5
    np.testing.assert_allclose(got, got.round(), atol=1e-9)  # evenly spaced, from 0 to 3
    assert (got.min(), got.max().round()) == (pytest.approx(0), 3)
    errors = [np.square(spec.four_levels(rows, exact) - rows).mean() / 4 for exact in (True, False)]
    assert 0.1 < errors[0] < 0.13 and errors[0] < errors[1] < 0.2  # .1175 for a normal


def test_bit_reversal_is_the_permutation_of_the_released_code():
    dims = 16
    values = np.arange(dims, dtype=float)  # ascending
    perm = np.zeros(dims, int)
    for i, position in enumerate(np.argsort(-values)):
        perm[int(f"{i:04b}"[::-1], 2)] = position
    assert (spec.bit_reversal(dims) == perm).all()


def test_the_product_makes_the_rotations_of_the_spec(subtests):
    for dims in POWERS + OTHERS:
        with subtests.test(dims=dims):
            targets = np.stack([covariance(dims, seed) for seed in range(2)])
            values, vectors, floored = matrices.eigenbasis(targets)
            made = matrices.compose(vectors)
            assert floored == 0 and (np.diff(values) >= 0).all()
            for g in range(2):
                np.testing.assert_allclose(made[g], spec.rotation(targets[g]), atol=1e-9)


def test_a_rank_deficient_target_is_floored_and_stays_orthonormal():
    rows = normal(10, 64)
    values, vectors, floored = matrices.eigenbasis((rows.T @ rows)[None])
    assert floored == 54
    assert values.min() > 0
    assert matrices.off_orthonormal(vectors) < 1e-12
    values, vectors, floored = matrices.eigenbasis(np.zeros((1, 64, 64)))
    assert floored == 64 and np.isfinite(values).all() and matrices.off_orthonormal(vectors) < 1e-12
