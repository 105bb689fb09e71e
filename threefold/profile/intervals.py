"""Unions, differences and gaps of time intervals as numpy arrays: what runs at once must not be added up.

Intervals are two arrays, starts and ends. A union is disjoint, in ascending order, and without empty intervals.
"""

from dataclasses import dataclass

import numpy as np

from threefold.profile.trace import Floats


@dataclass(frozen=True, slots=True)
class Union:
    """Disjoint intervals in ascending order that do not touch."""

    start: Floats
    end: Floats

    @property
    def seconds(self) -> float:
        return float(np.sum(self.end - self.start))

    def __len__(self) -> int:
        return len(self.start)


def union(start: Floats, end: Floats) -> Union:
    """The same times as disjoint intervals in ascending order."""
    some = end > start
    start, end = start[some], end[some]
    if not len(start):
        return Union(start, end)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)  # how far everything up to here runs
    opens = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([np.flatnonzero(opens)[1:] - 1, [len(start) - 1]])
    return Union(start[opens], reach[last])


def subtract(one: Union, other: Union) -> Union:
    """The times in `one` and not in `other`."""
    if not len(one) or not len(other):
        return one
    # Sweep over all boundaries: a stretch counts where `one` covers it and `other` does not.
    times = np.concatenate([one.start, one.end, other.start, other.end])
    steps_one = np.concatenate([np.ones(len(one)), -np.ones(len(one)), np.zeros(2 * len(other))])
    steps_other = np.concatenate([np.zeros(2 * len(one)), np.ones(len(other)), -np.ones(len(other))])
    order = np.argsort(times, kind="stable")
    times = times[order]
    inside = (np.cumsum(steps_one[order])[:-1] > 0) & (np.cumsum(steps_other[order])[:-1] == 0)
    return union(times[:-1][inside], times[1:][inside])


def intersect(one: Union, other: Union) -> Union:
    """The times in both."""
    return subtract(one, subtract(one, other))


def gaps(busy: Union) -> Union:
    """The times between the intervals of a union."""
    return Union(busy.end[:-1], busy.start[1:])


def clip(one: Union, start: float, end: float) -> Union:
    """The part of a union inside a window."""
    first = int(np.searchsorted(one.end, start, side="right"))
    last = int(np.searchsorted(one.start, end, side="left"))
    return union(np.maximum(one.start[first:last], start), np.minimum(one.end[first:last], end))


def outside(busy: Union, start: float, end: float) -> Union:
    """The times of a window that a union does not cover."""
    inside = clip(busy, start, end)
    return union(np.concatenate([[start], inside.end]), np.concatenate([inside.start, [end]]))
