"""Confidence intervals for step times and losses, which are noisy, skewed and correlated from step to step.

`speed.py`, `losses.py` and `regress/verdicts.py` call them. Values that follow each other closely are first combined
into blocks that are longer than their correlation, so that a slow minute does not count as a hundred observations.
Step times have rare outliers (garbage collection, another process), so their intervals are rank-based: medians by order
statistics, ratios by the Hodges-Lehmann estimate with the Mann-Whitney distribution. Nothing here draws random numbers.

An interval is None where there are too few values to give one.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
MOST_BLOCKS = 200  # of one series; more do not narrow an interval that matters
LEAST_BLOCKS = 4  # of each side of a ratio
EXACT_PAIRS = 400  # products of two counts up to which the Mann-Whitney distribution is counted out

Interval = tuple[float, float]
Values = NDArray[np.float64]


def correlation_length(values: Sequence[float] | Values) -> float:
    """The integrated autocorrelation time of a series in steps, 1 where neighbors are independent.

    It is computed on ranks, which one outlier cannot dominate. The sum over lags ends at the first lag that is five
    times the sum so far: beyond it there is only noise. Short series look less correlated than they are, so the time
    is at least that of a first-order process with the correlation of neighbors, corrected for that bias (Kendall,
    1954).
    """
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    ranks = np.argsort(np.argsort(series, kind="stable"), kind="stable").astype(np.float64)
    if count < 4 or np.all(series == series[0]):
        return 1.0
    centered = ranks - ranks.mean()
    power = np.abs(np.fft.rfft(centered, 2 * count)) ** 2
    covariance = np.fft.irfft(power)[:count]
    total = 1.0
    for lag in range(1, count // 2):
        total += 2 * covariance[lag] / covariance[0]
        if lag >= 5 * total:
            break
    neighbors = (count * covariance[1] / covariance[0] + 1) / (count - 3)
    first_order = min(max(neighbors, 0.0), 0.98)
    return float(max(total, (1 + first_order) / (1 - first_order)))


def blocks(values: Sequence[float] | Values) -> list[Values]:
    """The series cut into neighboring blocks of equal length, each about twice as long as values are correlated."""
    series = np.asarray(values, dtype=np.float64)
    length = correlation_length(series)
    size = 1 if length < 1.5 else math.ceil(2 * length)
    size = min(max(size, math.ceil(len(series) / MOST_BLOCKS)), len(series))
    count = len(series) // size
    rest = len(series) - count * size  # the first values are left out: they are nearest to the warm-up
    return [series[rest + i * size : rest + (i + 1) * size] for i in range(count)]


def median_interval(values: Sequence[float] | Values, confidence: float = CONFIDENCE) -> Interval | None:
    """An interval of the median by order statistics; None below six independent values."""
    middles = sorted(float(np.median(block)) for block in blocks(values))
    count, below, tail = len(middles), 0, 0.0
    while below < count:
        tail += math.comb(count, below) / 2**count
        if tail > (1 - confidence) / 2:
            break
        below += 1
    return (middles[below - 1], middles[count - below]) if below else None


def ratio_interval(
    first: Sequence[float] | Values, second: Sequence[float] | Values, confidence: float = CONFIDENCE
) -> tuple[float, Interval | None]:
    """How many times as large values of `second` are as those of `first`: the estimate and its interval.

    Both are positive. The estimate is the ratio of the medians, which are shown beside it; the interval is that of the
    median of all ratios between blocks, widened where it does not hold the estimate. Where a side has fewer than four
    blocks, there is no interval: four against four is the least at which an order of them is rare enough, and fewer
    against many would let a single slow step decide.
    """
    logs = [np.log([float(np.median(block)) for block in blocks(series)]) for series in (first, second)]
    ratios = np.sort((logs[1][:, None] - logs[0][None, :]).ravel())
    rank = _mann_whitney_rank(len(logs[0]), len(logs[1]), (1 - confidence) / 2)
    estimate = float(np.median(second) / np.median(first))
    if rank < 1 or min(map(len, logs)) < LEAST_BLOCKS:
        return estimate, None
    low, high = float(np.exp(ratios[rank - 1])), float(np.exp(ratios[len(ratios) - rank]))
    return estimate, (min(low, estimate), max(high, estimate))


def mean_interval(values: Sequence[float] | Values, confidence: float = CONFIDENCE) -> Interval | None:
    """Student's interval of the mean of a correlated series; None below three independent values."""
    means = [float(np.mean(block)) for block in blocks(values)]
    return t_interval(means, confidence) if len(means) >= 3 else None


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Student's interval of the mean of independent values; None below two."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = t_quantile((1 + confidence) / 2, count - 1) * spread / math.sqrt(count)
    return mean - half, mean + half


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution: exact for one and two degrees of freedom, else to about 1 %.

    From three on it is the Cornish-Fisher expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


@lru_cache(maxsize=1024)
def _mann_whitney_rank(first: int, second: int, tail: float) -> int:
    """How many of the smallest differences lie outside the interval, plus one; 0 where there is no such interval."""
    if first * second > EXACT_PAIRS:
        z = NormalDist().inv_cdf(1 - tail)
        mean, spread = first * second / 2, math.sqrt(first * second * (first + second + 1) / 12)
        return max(0, math.floor(mean - z * spread))
    counts = _arrangements(first, second)
    total, summed = math.comb(first + second, first), 0
    for number, count in enumerate(counts):
        summed += count
        if summed / total > tail:
            return number
    return 0


def _arrangements(first: int, second: int) -> list[int]:
    """In how many orders of two samples each value of Mann and Whitney's U comes up: Gauss's binomial coefficients."""
    counts = [1] + [0] * (first * second)
    for i in range(1, second + 1):
        for power in range(len(counts) - 1, first + i - 1, -1):
            counts[power] -= counts[power - first - i]
        for power in range(i, len(counts)):
            counts[power] += counts[power - i]
    return counts
