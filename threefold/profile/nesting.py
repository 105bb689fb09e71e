"""Finds the innermost span of a thread that encloses a moment: the operator or annotation around a launch.

Spans of one thread are nested, as calls are. A span's level is the number of spans that are open when it begins; at a
moment with `k` open spans the innermost one is the last span of level `k - 1` that began. Both counts are differences
of ranks in sorted arrays, so that millions of spans need no loop. `classify.py` and `axes.py` call it.
"""

import numpy as np

from threefold.profile.trace import Floats, HostSpans, Ints


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
