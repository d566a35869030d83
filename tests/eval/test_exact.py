"""Exact attention by plain products, and divergences, against NumPy in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.eval.tasks.exact import compare, divergence

B, H, G, L, T, D, DV = 2, 6, 2, 5, 21, 16, 8


def numpy_softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def numpy_divergence(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    p, q = numpy_softmax(scores), numpy_softmax(others)
    return (p * np.log(np.where(p > 0, p / np.maximum(q, 1e-300), 1))).sum(axis=-1)


def test_divergence_of_any_size(subtests):
    for size in [1e-4, 1e-2, 1.0, 30.0]:
        with subtests.test(size=size):
            rng = np.random.default_rng(0)
            scores = rng.normal(size=(4, 1000)).astype(np.float32)
            others = (scores + size * rng.normal(size=scores.shape)).astype(np.float32)
            right = numpy_divergence(scores.astype(np.float64), others.astype(np.float64))
            got = np.array(divergence(mx.array(scores), mx.array(others)))
            np.testing.assert_allclose(got, right, rtol=2e-3)
            assert not np.array(divergence(mx.array(scores), mx.array(scores))).any()


def test_divergence_where_one_side_has_nothing():
    """Probabilities below what float32 holds, on either side."""
    scores, others = mx.array([[0.0, -300.0]]), mx.array([[-300.0, 0.0]])
    assert divergence(scores, others).item() == pytest.approx(300, rel=1e-3)
    assert divergence(others, scores).item() == pytest.approx(300, rel=1e-3)


def test_compare(subtests):
    for mask in [None, "causal", "boolean", "per head", "additive"]:
        for with_sinks in [False, True]:
            with subtests.test(mask=mask, with_sinks=with_sinks):
                check_compare(mask, with_sinks)


def check_compare(mask, with_sinks):
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((B, H, L, D), (B, G, T, D), (B, G, T, DV))
    )
    other = (k + 0.1 * rng.normal(size=k.shape)).astype(np.float32)
    sinks = rng.normal(size=H).astype(np.float32) if with_sinks else None
    causal = np.arange(T - L, T)[:, None] >= np.arange(T)
    seen, given = {
        None: (np.ones((L, T), bool), None),
        "causal": (causal, "causal"),
        "boolean": (causal, mx.array(causal)),
        "per head": ((x := rng.random((B, H, L, T)) < 0.5), mx.array(x)),
        "additive": (causal, mx.array(np.where(causal, 0, -np.inf).astype(np.float32))),
    }[mask]

    def scores(keys: np.ndarray) -> np.ndarray:
        out = q.astype(np.float64) @ keys.astype(np.float64).repeat(H // G, 1).swapaxes(-1, -2)
        out = np.where(seen, 0.25 * out, -np.inf)
        if sinks is None:
            return out
        column = np.broadcast_to(sinks.astype(np.float64)[None, :, None, None], (B, H, L, 1))
        return np.concatenate([out, column], axis=-1)

    arrays = (mx.array(q), (mx.array(k), mx.array(v)), mx.array(other))
    out, nats = compare(*arrays, 0.25, given, None if sinks is None else mx.array(sinks))
    right = numpy_softmax(scores(k))[..., :T] @ v.astype(np.float64).repeat(H // G, 1)
    np.testing.assert_allclose(np.array(out), right, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(nats), numpy_divergence(scores(k), scores(other)), 2e-3)
