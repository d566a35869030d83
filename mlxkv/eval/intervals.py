"""Intervals of means and shares from few texts.

Texts are the random sample: tokens of one text, and questions about one document, are correlated. So every interval
here resamples texts or documents.

Which bootstrap: with 8 to 16 skewed samples (log-normal, as KL is over texts) the plain percentile
interval of a mean covers 66 to 89 % where it says 95. Studentised on the logarithm it covers 86 to 94
(tests/eval/test_intervals.py bounds it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from statistics import NormalDist

import numpy as np

HIGH = 0.975  # the upper end of an interval of 95 %
LEAST = 5  # fewer texts than this have no interval
RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A value with the limits of its interval, None with too few texts."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        return self.low is not None and self.high is not None

    @property
    def limits(self) -> tuple[float, float]:
        """(low, high), where they are `known`."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def holds(self, number: float) -> bool:
        """Return whether `number` is inside; without limits every number is."""
        return not self.known or self.limits[0] <= number <= self.limits[1]

    def as_list(self) -> list[float] | None:
        """Return [low, high] for JSON, or None."""
        return list(self.limits) if self.known else None


def mean(values: Sequence[float]) -> Interval:
    """Return the mean over texts, [n]: of numbers that are not negative, such as KL, by the studentised
    bootstrap of the logarithm of the mean (Efron and Tibshirani, An Introduction to the Bootstrap,
    section 12.5)."""
    x = np.asarray(values, dtype=np.float64)
    average, n = float(x.mean()), len(x)
    if n < LEAST or not np.isfinite(x).all():
        return Interval(average)
    if average <= 0 or x.min() == x.max():
        return Interval(average, average, average)
    drawn = x[_draws(n)]
    means = np.maximum(drawn.mean(axis=1), np.finfo(np.float64).tiny)
    errors = drawn.std(axis=1, ddof=1) / sqrt(n) / means
    error = x.std(ddof=1) / sqrt(n) / average
    # A resample of one text many times has next to no error, and its quotient no bound: where one text
    # is nearly all of the mean, the limits are those of twice Student's.
    bound = 2 * student(HIGH, n - 1)
    quotients = (np.log(means) - log(average)) / np.maximum(errors, error / 20)
    low, high = np.quantile(quotients, [1 - HIGH, HIGH]).clip(-bound, bound)
    return Interval(average, average * exp(-high * error), average * exp(-low * error))


def share(values: Sequence[float]) -> Interval:
    """Return the mean over texts of numbers of either sign, [n], by widened percentiles."""
    x = np.asarray(values, dtype=np.float64)
    return _widened(len(x), lambda draws: x[draws].mean(axis=-1), bool(np.isfinite(x).all()))


def ratio(values: Sequence[float], over: Sequence[float]) -> Interval:
    """Return the mean over texts divided by the mean of `over` on the same texts, [n] each, by widened
    percentiles."""
    x, y = (np.asarray(v, dtype=np.float64) for v in (values, over))
    return _widened(
        len(x), lambda draws: x[draws].mean(axis=-1) / y[draws].mean(axis=-1), bool(y.all())
    )


def _widened(n: int, of: Callable[[np.ndarray], np.ndarray], fine: bool) -> Interval:
    """Percentiles of a bootstrap, widened for n - 1 degrees of freedom and the divisor n
    (Hesterberg, What Teachers Should Know about the Bootstrap, 2015, section 5.1). of: numbers [..] of
    draws [.., n]."""
    value = float(of(np.arange(n)))
    if n < LEAST or not fine:
        return Interval(value)
    tail = NormalDist().cdf(-student(HIGH, n - 1) * sqrt(n / (n - 1)))
    low, high = np.quantile(of(_draws(n)), [tail, 1 - tail])
    return Interval(value, float(low), float(high))


@cache
def _draws(n: int) -> np.ndarray:
    """Return the texts of each resample, [RESAMPLES, n]; the same in every call."""
    return np.random.default_rng(n).integers(0, n, (RESAMPLES, n))


@cache
def student(share: float, degrees: int) -> float:
    """Return the quantile of Student's t: with t = sqrt(degrees) tan(a), the density of the angle a is
    proportional to cos(a)^(degrees - 1)."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(sqrt(degrees) * np.tan(np.interp(share, area / area[-1], angles)))


def wilson(right: int, count: int) -> Interval:
    """Return the share of right answers with Wilson's score interval (Wilson 1927)."""
    if not count:
        return Interval(float("nan"))
    z, p = NormalDist().inv_cdf(HIGH), right / count
    middle, scale = p + z * z / (2 * count), 1 + z * z / count
    half = z * sqrt(p * (1 - p) / count + (z / (2 * count)) ** 2)
    low, high = (middle - half) / scale, (middle + half) / scale
    return Interval(p, 0.0 if right == 0 else low, 1.0 if right == count else high)


def found(documents: Sequence[Sequence[bool]]) -> Interval:
    """Return the share of right answers. documents: of each, whether its answers are right.

    Wilson's interval assumes independent answers, resampling documents does not: the wider limits of both are used."""
    answers = [bool(answer) for document in documents for answer in document]
    plain = wilson(sum(answers), len(answers))
    right, counts = (np.array([f(document) for document in documents], float) for f in (sum, len))
    return _wider(plain, right, counts)


def lost(ours: Sequence[Sequence[bool]], theirs: Sequence[Sequence[bool]]) -> Interval:
    """Return the share that `theirs` answers rightly minus that of `ours`, on the same questions of the
    same documents: Newcombe's interval for paired shares (Statistics in Medicine 17, 1998, method 10)
    or what resampling documents gives, the wider limits of both."""
    pairs = [
        (bool(b), bool(a))
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    counts = [sum(pair == (i, j) for pair in pairs) for i in (True, False) for j in (True, False)]
    plain = newcombe(*counts)
    gaps = [sum(y) - sum(x) for x, y in zip(ours, theirs, strict=True)]
    gap, count = np.array(gaps, float), np.array([len(x) for x in ours], float)
    return _wider(plain, gap, count)


def newcombe(both: int, first: int, second: int, none: int) -> Interval:
    """Return the share of a first method minus that of a second. both: answers right in both; first,
    second: right in that one alone; none: right in neither (Newcombe 1998, method 10)."""
    count = both + first + second + none
    if not count:
        return Interval(float("nan"))
    a, b = wilson(both + first, count), wilson(both + second, count)
    margins = (both + first) * (second + none) * (both + second) * (first + none)
    product = both * none - first * second
    if product > 0:  # corrected for continuity
        product = max(product - count / 2, 0)
    phi = product / sqrt(margins) if margins else 0.0
    gap = a.value - b.value

    def side(x: float, y: float) -> float:
        return sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    (a_low, a_high), (b_low, b_high) = a.limits, b.limits
    below = side(a.value - a_low, b_high - b.value)
    above = side(a_high - a.value, b.value - b_low)
    return Interval(gap, max(-1.0, gap - below), min(1.0, gap + above))


def _wider(plain: Interval, sums: np.ndarray, counts: np.ndarray) -> Interval:
    """`plain`, or what resampling documents gives, the wider limits of both. sums, counts: of each document."""
    drawn = _widened(len(sums), lambda d: sums[d].sum(-1) / np.maximum(counts[d].sum(-1), 1), True)
    if not (plain.known and drawn.known):
        return plain
    lows, highs = zip(plain.limits, drawn.limits, strict=True)
    return Interval(plain.value, min(lows), max(highs))
