"""Unions, differences and gaps of time intervals as numpy arrays: what runs at once must not be added up.

Intervals are two arrays, starts and ends. A union is disjoint, in ascending order, and without empty intervals.

Spans of one thread are nested, as calls are. A span's level is the number of spans that are open when it begins; at a
moment with `k` open spans the innermost one is the last span of level `k - 1` that began. Both counts are differences
of ranks in sorted arrays, so that millions of spans need no loop.
"""

from dataclasses import dataclass

import numpy as np

from threefold.profile.trace import Floats, HostSpans, Ints


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


class Enclosing:
    """An index over spans of many threads."""

    def __init__(self, spans: HostSpans) -> None:
        chosen = np.flatnonzero((spans.end > spans.start) & (spans.thread >= 0))
        # Threads are laid out one behind the other on one time line.
        self._length = float(spans.end[chosen].max()) + 1.0 if len(chosen) else 1.0
        start = spans.start[chosen] + spans.thread[chosen] * self._length
        end = spans.end[chosen] + spans.thread[chosen] * self._length
        order = np.lexsort((-end, start))  # of spans that begin together, the outer one first
        self._index, self._start, self._end = chosen[order], start[order], end[order]
        self._sorted_end = np.sort(self._end)
        level = np.arange(len(order)) - np.searchsorted(self._sorted_end, self._start, side="right")
        self._by_level = np.lexsort((np.arange(len(order)), level))
        self._level = level[self._by_level]

    def innermost(self, thread: Ints, time: Floats) -> Ints:
        """For each moment of a thread, the index of the innermost span that encloses it, or -1."""
        found = np.full(len(time), -1, np.int64)
        asked = np.flatnonzero((thread >= 0) & (time >= 0) & (time < self._length))
        if not len(asked) or not len(self._index):
            return found
        moment = time[asked] + thread[asked] * self._length
        num_open = np.searchsorted(self._start, moment, side="right")
        num_open -= np.searchsorted(self._sorted_end, moment, side="right")
        for level in np.unique(num_open[num_open > 0]) - 1:
            first, last = np.searchsorted(self._level, [level, level + 1])
            spans = self._by_level[first:last]
            if not len(spans):
                continue
            here = num_open == level + 1
            place = np.searchsorted(self._start[spans], moment[here], side="right") - 1
            span = spans[np.maximum(place, 0)]
            is_inside = (place >= 0) & (self._end[span] > moment[here])
            found[asked[here]] = np.where(is_inside, self._index[span], -1)
        return found
