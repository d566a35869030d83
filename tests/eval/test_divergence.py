"""KL divergence with the cache in the loop: zero against itself, ordered by bits, large if broken."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.codec.codec import Codec
from mlxkv.eval.arms import Arms
from mlxkv.eval.tasks import divergence
from mlxkv.models import load

CONTEXT, DECODE = 384, 24


@pytest.fixture(scope="module")
def arms(model_folder):
    return Arms(load(str(model_folder)), ["int8", "int4", "srft-int2+g32"], (16, 16))


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(0)
    return rng.integers(0, 255, CONTEXT + DECODE + 1).tolist()


def test_compare_is_the_formula_in_float64():
    rng = np.random.default_rng(0)
    base, logits = rng.normal(0, 3, (2, 40, 100))
    targets = rng.integers(0, 100, 40)

    def logs(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = logs(base), logs(logits)
    found = divergence.compare(
        mx.array(base, mx.float32), mx.array(logits, mx.float32), mx.array(targets)
    )
    rows = np.arange(40)
    np.testing.assert_allclose(found.kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(found.nll, -q[rows, targets], rtol=1e-4)
    np.testing.assert_allclose(found.nll_base, -p[rows, targets], rtol=1e-4)
    delta = np.exp(q[rows, targets]) - np.exp(p[rows, targets])
    np.testing.assert_allclose(found.delta, delta, atol=1e-6)
    assert (found.same == (p.argmax(-1) == q.argmax(-1))).all()


def test_tiny_divergences_are_resolved_and_never_negative():
    """The plain sum of p (log p - log q) in float32 is off by 1e-7 and more here."""
    rng = np.random.default_rng(1)
    base = rng.normal(0, 2, (64, 3000))
    logits = base + rng.normal(0, 3e-4, base.shape)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (base, logits))
    exact = (np.exp(p) * (p - q)).sum(-1)
    zeros = mx.zeros(64, mx.int32)
    kl = divergence.compare(mx.array(base, mx.float32), mx.array(logits, mx.float32), zeros).kl
    assert (kl >= 0).all()
    np.testing.assert_allclose(kl, exact, rtol=0.05)


def test_masked_tokens_do_not_count():
    base = mx.array([[0.0, 1.0, -mx.inf]])
    logits = mx.array([[0.0, 2.0, -mx.inf]])
    found = divergence.compare(base, logits, mx.array([1]))
    assert np.isfinite(found.kl).all() and found.kl[0] > 0


def test_full_precision_against_itself_is_exactly_zero(arms, tokens):
    found = divergence.measure(arms, ["fp16"], tokens, CONTEXT, lambda n: None)["fp16"]
    for leg in divergence.LEGS:
        s = found["legs"][leg]
        assert s["kl"]["max"] == 0.0 and s["same_top"] == 1.0
        assert s["ppl"] == s["ppl_base"] and s["delta_p"]["rms"] == 0.0
    assert found["legs"]["decode"]["tokens"] == DECODE
    assert found["legs"]["prompt"]["tokens"] == CONTEXT - CONTEXT // 2


def test_fewer_bits_diverge_more_and_progress_adds_up(arms, tokens):
    seen = []
    names = ["int8", "int4", "srft-int2+g32"]
    found = divergence.measure(arms, names, tokens, CONTEXT, seen.append)
    assert sum(seen) == len(names) * (CONTEXT + DECODE)
    kl = [found[name]["legs"]["decode"]["kl"]["mean"] for name in names]
    assert 0 < kl[0] < kl[1] < kl[2]
    stored = [found[name]["kv_bytes"] for name in names]
    assert stored[0] > stored[1] > stored[2]


def test_the_model_is_left_as_it_was(arms, tokens):
    before = set(vars(arms.loaded.model))
    divergence.measure(arms, ["int4"], tokens[:300], 280, lambda n: None)
    assert set(vars(arms.loaded.model)) == before


def test_shuffled_codes_are_far_off(arms, tokens, monkeypatch):
    sound = divergence.measure(arms, ["int4"], tokens, CONTEXT, lambda n: None)["int4"]
    encode = Codec.encode

    def shuffled(self, x, way):
        stored = encode(self, x, way)
        return stored | {"codes": stored["codes"][:, :, ::-1]}

    monkeypatch.setattr(Codec, "encode", shuffled)
    broken = divergence.measure(arms, ["int4"], tokens, CONTEXT, lambda n: None)["int4"]
    # A random model hardly attends: on a trained one it is thousands (test_eval.py).
    assert broken["legs"]["decode"]["kl"]["mean"] > 4 * sound["legs"]["decode"]["kl"]["mean"]
