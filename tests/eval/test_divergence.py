"""KL divergence with the cache in the loop: zero against itself, ordered by bits, large if broken."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.corpora.sources import Text
from mlxkv.eval import divergence
from mlxkv.eval.arms import Arms
from mlxkv.eval.divergence import Tokens, summary
from mlxkv.eval.engine import TaskOptions
from mlxkv.loading.load import load

CONTEXT, DECODE = 384, 24


@pytest.fixture(scope="module")
def arms(model_folder):
    return Arms(load(str(model_folder), "fp16"), ["int8", "int4", "srft-int2+g32"], (16, 16))


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


def test_each_token_predicts_the_next_and_half_of_the_prompt_is_scored(arms, tokens):
    found = divergence.measure(arms, ["fp16"], tokens, CONTEXT, lambda n: None)["fp16"]
    logits = arms.loaded.model(mx.array(tokens[:-1])[None])[0].astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    exact = -np.array(logs)[np.arange(len(tokens) - 1), tokens[1:]]
    for leg, part in (("prompt", slice(CONTEXT // 2, CONTEXT)), ("decode", slice(CONTEXT, None))):
        nll = Tokens.unpacked(found["scored"][leg]).nll
        np.testing.assert_allclose(nll, exact[part], atol=2e-3)


def test_full_precision_against_itself_is_exactly_zero(arms, tokens):
    found = divergence.measure(arms, ["fp16"], tokens, CONTEXT, lambda n: None)["fp16"]
    for leg in divergence.LEGS:
        s = found["legs"][leg]
        assert s["kl"]["max"] == 0.0 and s["same_top"] == 1.0
        assert s["ppl"] == s["ppl_base"]
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


def test_texts_are_pooled_token_by_token(arms, tokens, monkeypatch):
    """Means over two texts are means over all their tokens; each text keeps its own."""
    texts = [Text("one", tokens), Text("two", tokens[::-1])]
    options = TaskOptions(contexts=(CONTEXT,), decode=DECODE)

    def texts_of(loaded, count, *_):
        assert count == CONTEXT + DECODE + 1
        return texts

    monkeypatch.setattr(divergence.sources, "evaluation_texts", texts_of)
    parts = divergence.parts(arms, options)
    assert [(p.task, p.context, p.text) for p in parts] == [
        ("divergence", CONTEXT, "1"),
        ("divergence", CONTEXT, "2"),
    ]
    found = [dict(p.run(arms, ["fp16", "int4"], lambda n: None))["int4"] for p in parts]
    found = json.loads(json.dumps(found))  # as rows keep them
    for one in found:
        one["legs"]["prompt"]["same_top"] = 0.5  # or both legs may have the same
    found[0]["kv_bytes"] += 9
    both = divergence.pooled(found)
    own = [one["legs"]["decode"] for one in found]
    assert [one["name"] for one in both["texts"]] == ["one", "two"]
    prompts = [one["legs"]["prompt"] for one in found]
    for key, legs in (("kl", own), ("prompt_kl", prompts)):
        assert [one[key] for one in both["texts"]] == [leg["kl"]["mean"] for leg in legs]
    for key, name in (("top1", "same_top"), ("ppl_log_ratio", "ppl_log_ratio")):
        assert [one[key] for one in both["texts"]] == [leg[name] for leg in own]
    assert both["legs"]["prompt"]["kl"]["mean"] == pytest.approx(
        np.mean([leg["kl"]["mean"] for leg in prompts])
    )
    assert both["kv_bytes"] == max(one["kv_bytes"] for one in found)
    decode = both["legs"]["decode"]
    assert decode["tokens"] == 2 * DECODE
    assert decode["kl"]["mean"] == pytest.approx(np.mean([one["kl"]["mean"] for one in own]))
    assert decode["kl"]["max"] == pytest.approx(max(one["kl"]["max"] for one in own))
    assert decode["ppl_base"] == pytest.approx(np.prod([one["ppl_base"] for one in own]) ** 0.5)


def test_summary_is_what_its_names_say():
    rng = np.random.default_rng(0)
    nll, base, kl = rng.exponential(1.0, (3, 500))
    s = summary(Tokens(nll, base, kl, (rng.random(500) < 0.9).astype(float)))
    assert s["tokens"] == 500
    assert s["ppl"] == pytest.approx(np.exp(np.mean(nll)))
    assert s["ppl_base"] == pytest.approx(np.exp(np.mean(base)))
    assert s["ppl_log_ratio"] == pytest.approx(np.mean(nll - base))
    assert s["kl"]["mean"] == pytest.approx(np.mean(kl))
    assert s["kl"]["p99"] == pytest.approx(np.percentile(kl, 99))


def test_divergence_where_one_side_has_nothing():
    """Probabilities below what float32 holds, on either side."""
    scores, others = mx.array([[0.0, -300.0]]), mx.array([[-300.0, 0.0]])
    assert divergence.divergence(scores, others).item() == pytest.approx(300, rel=1e-3)
    assert divergence.divergence(others, scores).item() == pytest.approx(300, rel=1e-3)
