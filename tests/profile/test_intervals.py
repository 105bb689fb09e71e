"""Unions, differences and gaps against a grid on which every microsecond is looked at."""

import numpy as np
import pytest

from threefold.profile.intervals import gaps, intersect, subtract, union

LENGTH = 400


def on_grid(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which unit of time some interval covers."""
    covered = np.zeros(LENGTH, bool)
    for start, end in zip(starts, ends, strict=True):
        covered[int(start) : int(end)] = True
    return covered


@pytest.mark.parametrize("seed", range(20))
def test_random_intervals_agree_with_a_grid(seed: int) -> None:
    draw = np.random.default_rng(seed)
    pairs = []
    for count in (int(draw.integers(0, 60)), int(draw.integers(0, 60))):
        starts = draw.integers(0, LENGTH - 40, count).astype(float)
        pairs.append((starts, starts + draw.integers(0, 40, count)))
    (a, b) = (union(*pair) for pair in pairs)
    grid_a, grid_b = (on_grid(*pair) for pair in pairs)
    assert a.seconds == grid_a.sum()
    assert subtract(a, b).seconds == (grid_a & ~grid_b).sum()
    assert intersect(a, b).seconds == (grid_a & grid_b).sum()
    assert np.all(a.start[1:] > a.end[:-1])
    if len(a):
        assert gaps(a).seconds == a.end[-1] - a.start[0] - a.seconds


def test_intervals_that_touch_are_one() -> None:
    found = union(np.array([2.0, 0.0, 5.0]), np.array([3.0, 2.0, 5.0]))
    assert (found.start.tolist(), found.end.tolist()) == ([0.0], [3.0])
