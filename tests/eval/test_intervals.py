"""Intervals against published values, simulations and cases whose answer is known."""

import numpy as np
import pytest

from mlxkv.eval import intervals
from mlxkv.eval.intervals import Interval


def test_wilson_has_the_published_values():
    """Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3."""
    for right, asked, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = intervals.wilson(right, asked)
        assert found.value == right / asked
        assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)
    assert intervals.wilson(16, 16).low == pytest.approx(0.8064, abs=6e-5)
    assert intervals.wilson(16, 16).high == 1.0


def test_paired_shares_have_the_published_value():
    """Newcombe, Statistics in Medicine 17 (1998) 2635, table II, method 10."""
    found = intervals.newcombe(36, 12, 2, 0)
    assert found.value == pytest.approx(0.2)
    assert (found.low, found.high) == pytest.approx((0.0569, 0.3404), abs=6e-5)


def test_intervals_hold_the_truth_about_as_often_as_they_say(subtests):
    for texts in [6, 16]:
        with subtests.test(texts=texts):
            rng, rounds = np.random.default_rng(1), 300
            held = {"mean": 0, "share": 0}
            for _ in range(rounds):
                a = rng.standard_normal(texts)
                held["mean"] += intervals.mean(np.exp(0.7 * a)).holds(np.exp(0.7**2 / 2))
                held["share"] += intervals.share(a).holds(0.0)
            # 95 % of 300 is 285 +- 3.8; skewed texts cost some points, percentiles as they come seven.
            for name, least in {"mean": 0.85, "share": 0.92}.items():
                assert least * rounds <= held[name] <= 0.995 * rounds, name


def test_the_interval_of_skewed_texts_reaches_further_up():
    """The mean of few skewed texts is more often too small than too large."""
    reach = []
    for seed in range(12):
        found = intervals.mean(np.exp(1.5 * np.random.default_rng(seed).standard_normal(12)))
        reach.append(np.log(found.high / found.value) / np.log(found.value / found.low))
    assert np.median(reach) > 1.3


def test_equal_numbers_have_no_width():
    assert intervals.mean([0.25] * 6) == Interval(0.25, 0.25, 0.25)
    assert intervals.mean([0.0] * 8) == Interval(0.0, 0.0, 0.0)


def test_few_texts_and_broken_ones_have_no_interval():
    found = intervals.mean([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5 and not found.known and found.as_list() is None and found.holds(99)
    broken = intervals.mean([1.0, float("nan"), 1.0, 1.0, 1.0])
    assert np.isnan(broken.value) and not broken.known
    assert not intervals.share([1.0, float("inf"), 1, 1, 1]).known


def test_a_ratio_is_paired_by_text():
    """Texts differ by factors that both share: only what differs between the two widens the interval."""
    hard = [0.001, 0.02, 0.3, 0.05, 0.007, 0.1]
    assert intervals.ratio([3 * x for x in hard], hard).as_list() == pytest.approx([3.0, 3.0])
    near = intervals.ratio([3 * x * f for x, f in zip(hard, (0.8, 1.2) * 3, strict=True)], hard)
    assert near.value == pytest.approx(3 * (0.8 * 0.308 + 1.2 * 0.17) / 0.478)
    assert near.low < near.value < near.high < 4
    assert not intervals.ratio(hard, [0.0] + hard[1:]).known


def test_answers_of_one_document_are_alike():
    """Four documents all right and four all wrong tell less than 64 answers half of which are right."""
    mixed = [[True, False] * 4] * 8
    alike = [[True] * 8] * 4 + [[False] * 8] * 4
    plain = intervals.wilson(32, 64)
    assert (intervals.found(mixed).low, intervals.found(mixed).high) == (plain.low, plain.high)
    assert intervals.found(alike).low < plain.low - 0.1
    assert intervals.found([[True] * 16] * 8).low == intervals.wilson(128, 128).low


def test_what_is_lost_is_paired_by_question():
    base = [[True] * 16] * 8
    worse = [[True] * 13 + [False] * 3] * 8
    found = intervals.lost(worse, base)
    assert found.value == pytest.approx(3 / 16) and found.low > 0.1
    assert intervals.lost(base, base).holds(0.0)
    assert intervals.lost(base, base).high == pytest.approx(0.029, abs=1e-3)
