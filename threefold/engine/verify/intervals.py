"""Unions and intersections of time intervals: durations of things that run at once must not be added up.

`exchange_times.py` uses them.
"""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def total_length(intervals: Iterable[Interval]) -> float:
    """The length of the union."""
    return sum(end - start for start, end in union(intervals))


def intersection(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The times that lie in both."""
    found, left, right = [], union(one), union(other)
    while left and right:
        start, end = max(left[0][0], right[0][0]), min(left[0][1], right[0][1])
        if start < end:
            found.append((start, end))
        (left if left[0][1] < right[0][1] else right).pop(0)
    return found
