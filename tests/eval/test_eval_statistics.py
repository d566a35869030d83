"""Statistics over tokens, against plain formulas, and llama.cpp's block."""

import numpy as np
import pytest

from mlxkv.eval.tasks.statistics import Tokens, block, joined, summary

N = 500


@pytest.fixture
def tokens():
    rng = np.random.default_rng(0)
    base = rng.exponential(1.0, N)
    nll = base + rng.normal(0, 0.1, N)
    kl = rng.exponential(0.01, N)
    delta = np.exp(-nll) - np.exp(-base)
    return Tokens(nll, base, kl, delta, (rng.random(N) < 0.9).astype(float))


def test_summary_is_what_its_names_say(tokens):
    s = summary(tokens)
    assert s["tokens"] == N
    assert s["ppl"] == pytest.approx(np.exp(np.mean(tokens.nll)))
    assert s["ppl_base"] == pytest.approx(np.exp(np.mean(tokens.nll_base)))
    assert s["ppl_error"] == pytest.approx(s["ppl"] * np.std(tokens.nll, ddof=1) / np.sqrt(N))
    assert s["ppl_correlation"] == pytest.approx(np.corrcoef(tokens.nll, tokens.nll_base)[0, 1])
    assert s["ppl_ratio"] == pytest.approx(s["ppl"] / s["ppl_base"])
    assert s["ppl_log_ratio"] == pytest.approx(np.mean(tokens.nll - tokens.nll_base))
    error = np.std(tokens.nll - tokens.nll_base, ddof=1) / np.sqrt(N)
    assert s["ppl_log_ratio_error"] == pytest.approx(error)
    assert s["ppl_ratio_error"] == pytest.approx(s["ppl_ratio"] * error)
    assert s["kl"]["mean"] == pytest.approx(np.mean(tokens.kl))
    assert s["kl"]["p99"] == pytest.approx(np.percentile(tokens.kl, 99))
    assert s["kl"]["p50"] == pytest.approx(np.median(tokens.kl))
    assert s["delta_p"]["rms"] == pytest.approx(np.sqrt(np.mean(tokens.delta**2)))
    assert s["same_top"] == np.mean(tokens.same)


def test_the_difference_of_perplexities_knows_their_correlation(tokens):
    """Errors of the same text cancel: the error of the difference is far below either's own, and
    resampling agrees with it."""
    s = summary(tokens)
    rng = np.random.default_rng(1)
    picks = rng.integers(0, N, (4000, N))
    drawn = np.exp(tokens.nll[picks].mean(1)) - np.exp(tokens.nll_base[picks].mean(1))
    assert s["ppl_difference_error"] == pytest.approx(drawn.std(), rel=0.15)
    assert s["ppl_difference_error"] < 0.3 * s["ppl_error"]


def test_one_token_and_no_spread_are_no_errors():
    one = Tokens(*(np.ones(1) for _ in range(5)))
    s = summary(one)
    assert s["ppl_error"] == 0.0 and s["ppl_difference_error"] == 0.0
    assert s["ppl_correlation"] == 1.0


def test_the_block_has_the_lines_that_llama_cpp_prints(tokens):
    text = block(summary(tokens))
    for line in (
        "====== Perplexity statistics ======",
        "Mean PPL(Q)                   :",
        "Cor(ln(PPL(Q)), ln(PPL(base))):",
        "Mean PPL(Q)-PPL(base)         :",
        "====== KL divergence statistics ======",
        "Mean    KLD                   :",
        "Maximum KLD                   :",
        "99.9% KLD                     :",
        "Median KLD                    :",
        " 1.0% KLD                     :",
        "====== Token probability statistics ======",
        "RMS Δp                        :",
        "Same top p                    :",
    ):
        assert line in text
    assert f"{summary(tokens)['kl']['mean']:10.6f}" in text


def test_parts_join_in_order(tokens):
    again = joined([tokens[:100], tokens[100:]])
    assert summary(again) == summary(tokens)
