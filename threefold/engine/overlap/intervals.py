"""Unions of time intervals. Durations of things that run at once must not be added up."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint and in order."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def common(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    found, left, right = [], union(one), union(other)
    while left and right:
        start, end = max(left[0][0], right[0][0]), min(left[0][1], right[0][1])
        if start < end:
            found.append((start, end))
        (left if left[0][1] < right[0][1] else right).pop(0)
    return found
