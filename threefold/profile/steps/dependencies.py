"""What a device operation had to wait for: the one before it on its stream, and those behind events of other streams.

A stream that waits for an event waits for the last operation that was issued to the other stream before the event was
recorded, and for whatever that stream itself waited for between that operation and the record: relays are followed.
Operations are ordered by the moments at which the host issued them, because the times of waits and records may be
missing. `budget.py` asks for the producer that ended last.
"""

import numpy as np

from threefold.profile.trace import Floats, Ints, Trace

_MAX_RELAYS = 64  # a chain of streams that only pass a wait on


def last_producers(trace: Trace, issued: Floats) -> Ints:
    """For each device span the index of the span that it waited for and that ended last, -1 where none is known.

    `issued` has the moment at which the host issued each span, NaN for unknown.
    """
    spans = trace.device_spans
    streams = _Streams(trace, issued)
    producer = streams.before
    waits = trace.waits
    resolved = _Relays(trace, streams)
    for number in range(len(waits)):
        ends = resolved.producers(number)
        consumer = streams.next_after(int(waits.device[number]), int(waits.stream[number]), float(waits.moment[number]))
        for one in ends:
            if consumer >= 0 and (producer[consumer] < 0 or spans.end[one] > spans.end[producer[consumer]]):
                producer[consumer] = one
    return producer


class _Streams:
    """The operations of each stream in the order in which they were issued."""

    def __init__(self, trace: Trace, issued: Floats) -> None:
        spans = trace.device_spans
        known = np.where(np.isnan(issued), spans.start, issued)
        order = np.lexsort((spans.start, known, spans.stream, spans.device))
        self.before = np.full(len(spans), -1, np.int64)
        same = (spans.stream[order][1:] == spans.stream[order][:-1]) & (
            spans.device[order][1:] == spans.device[order][:-1]
        )
        self.before[order[1:][same]] = order[:-1][same]
        edges = np.flatnonzero(np.concatenate([[True], ~same, [True]])) if len(order) else np.empty(0, np.int64)
        self._of: dict[tuple[int, int], tuple[Ints, Floats]] = {}
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            part = order[first:last]
            self._of[int(spans.device[part[0]]), int(spans.stream[part[0]])] = part, known[part]

    def next_after(self, device: int, stream: int, moment: float) -> int:
        """The first operation of a stream that was issued after a moment, or -1."""
        part, issued = self._of.get((device, stream), (np.empty(0, np.int64), np.empty(0)))
        place = int(np.searchsorted(issued, moment, side="left"))
        return int(part[place]) if place < len(part) else -1

    def last_before(self, device: int, stream: int, moment: float) -> tuple[int, float]:
        """The last operation of a stream that was issued before a moment, and when; -1 where there is none."""
        part, issued = self._of.get((device, stream), (np.empty(0, np.int64), np.empty(0)))
        place = int(np.searchsorted(issued, moment, side="left")) - 1
        return (int(part[place]), float(issued[place])) if place >= 0 else (-1, -np.inf)


class _Relays:
    """The operations behind each wait, through streams that pass it on."""

    def __init__(self, trace: Trace, streams: _Streams) -> None:
        self.waits, self.streams = trace.waits, streams
        self.found: dict[int, tuple[int, ...]] = {}
        order = np.argsort(self.waits.moment, kind="stable")
        self.on_stream: dict[tuple[int, int], list[int]] = {}
        for number in order.tolist():
            key = int(self.waits.device[number]), int(self.waits.stream[number])
            self.on_stream.setdefault(key, []).append(number)
        self.moments = {key: self.waits.moment[numbers] for key, numbers in self.on_stream.items()}

    def producers(self, number: int, depth: int = 0) -> tuple[int, ...]:
        """The device spans that a wait stands for."""
        if number in self.found or depth > _MAX_RELAYS:
            return self.found.get(number, ())
        self.found[number] = ()  # a wait of a damaged file may lead back to itself
        waits = self.waits
        recorded, stream = float(waits.recorded[number]), int(waits.producer_stream[number])
        if np.isnan(recorded):
            return ()
        key = int(waits.device[number]), stream
        last, issued = self.streams.last_before(*key, recorded)
        ends = {last} if last >= 0 else set[int]()
        moments = self.moments.get(key, np.empty(0))
        for place in range(*np.searchsorted(moments, [issued, recorded]).tolist()):
            ends.update(self.producers(self.on_stream[key][place], depth + 1))
        self.found[number] = tuple(sorted(ends))
        return self.found[number]
