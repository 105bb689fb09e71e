"""Intervals that hold as often as they claim, also for correlated values, and quantiles beside scipy's."""

import math

import numpy as np
import pytest
from scipy import stats

from threefold.compare.statistics import (
    blocks,
    correlation_length,
    mean_interval,
    median_interval,
    ratio_interval,
    t_interval,
    t_quantile,
)


def series(draw: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Logarithms of step times: a first-order process, with an outlier now and then."""
    noise = draw.standard_normal(count + 50)
    values = np.zeros(count + 50)
    for i in range(1, len(values)):
        values[i] = correlation * values[i - 1] + noise[i]
    return 0.02 * values[50:] + 0.5 * (draw.random(count) < 0.03)


@pytest.mark.parametrize("probability", [0.9, 0.975, 0.995])
@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 40])
def test_t_quantiles_are_those_of_scipy(probability: float, degrees: int) -> None:
    # The expansion is least accurate at three degrees of freedom and far out: 0.8 % there.
    assert t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=0.01)


def test_t_interval_is_that_of_scipy() -> None:
    values = [1.0, 1.2, 0.9, 1.4, 1.1, 1.3]
    theirs = stats.t.interval(0.95, 5, np.mean(values), stats.sem(values))
    assert t_interval(values) == pytest.approx(theirs, rel=1e-3)
    assert t_interval([1.0]) is None


def test_rank_of_the_ratio_interval_is_mann_whitneys() -> None:
    """Five against five: the interval leaves out the two smallest and largest of 25 ratios (critical value 2)."""
    first, second = np.exp([0.0, 0.1, 0.2, 0.3, 0.4]), np.exp([1.03, 1.12, 1.21, 1.37, 1.45])
    ratios = np.sort((np.log(second)[:, None] - np.log(first)[None, :]).ravel())
    # The values ascend, which is correlation: shuffled they are independent.
    order = [2, 0, 4, 1, 3]
    estimate, interval = ratio_interval(first[order], second[order])
    assert interval is not None
    assert math.log(estimate) == pytest.approx(1.21 - 0.2)  # the ratio of the medians, which are shown beside it
    assert [math.log(end) for end in interval] == pytest.approx([ratios[2], ratios[-3]])


@pytest.mark.parametrize(("correlation", "count"), [(0.0, 30), (0.5, 100), (0.8, 200)])
def test_equal_runs_are_seldom_told_apart(correlation: float, count: int) -> None:
    draw = np.random.default_rng(1)
    false = {"ratio": 0, "mean": 0, "median": 0}
    trials = 300
    for _ in range(trials):
        one, other = series(draw, count, correlation), series(draw, count, correlation)
        ratio, mean, median = (
            ratio_interval(np.exp(one), np.exp(other))[1],
            mean_interval(one - other),
            median_interval(one),
        )
        false["ratio"] += ratio is not None and not ratio[0] <= 1 <= ratio[1]
        false["mean"] += mean is not None and not mean[0] <= 0 <= mean[1]
        # The outliers move the true median by 0.0008 of a standard deviation of 0.02 or more.
        false["median"] += median is not None and not median[0] <= 0.0008 <= median[1]
    # 5 % is claimed. Correlated series are held to 12 %: their correlation is estimated from the series itself.
    most = 0.08 if correlation == 0 else 0.12
    assert all(count <= most * trials for count in false.values()), false


def test_a_difference_of_five_percent_is_seen() -> None:
    draw = np.random.default_rng(2)
    seen = 0
    for _ in range(100):
        one, other = series(draw, 40, 0.0), series(draw, 40, 0.0) + math.log(1.05)
        interval = ratio_interval(np.exp(one), np.exp(other))[1]
        seen += interval is not None and interval[0] > 1
    assert seen >= 95


def test_correlated_values_are_combined_into_blocks() -> None:
    draw = np.random.default_rng(3)
    assert correlation_length(draw.standard_normal(2000)) == pytest.approx(1.0, abs=0.3)
    # The integrated time of a first-order process is (1 + r) / (1 - r) = 9.
    assert correlation_length(series(draw, 20_000, 0.8)) == pytest.approx(9.0, rel=0.2)
    assert all(len(block) >= 10 for block in blocks(series(draw, 2000, 0.8)))


def test_too_few_values_give_no_interval() -> None:
    assert ratio_interval([1.0, 1.1, 0.9], [2.0, 2.1, 1.9]) == (pytest.approx(2.0, rel=0.2), None)
    assert median_interval([1.0, 1.2, 1.1, 0.9, 1.05]) is None
    assert median_interval([1.0]) is None
    assert mean_interval([1.0, 2.0]) is None
    assert ratio_interval([1.0], [2.0]) == (2.0, None)
    assert ratio_interval([1.0] * 55, [2.0] * 3) == (2.0, None)


def test_constant_times_give_a_certain_ratio() -> None:
    assert ratio_interval([2.0] * 10, [3.0] * 10) == (pytest.approx(1.5), pytest.approx((1.5, 1.5)))
