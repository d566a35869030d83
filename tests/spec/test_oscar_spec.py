"""Calibrated rotations: brute force, the theorem, and the product against the spec."""

import numpy as np

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
