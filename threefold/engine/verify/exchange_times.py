"""Times at which the expert-parallel all-to-alls of a step were under way, and at which compute waited for them.

An exchange is exposed while some code waits for it, and hidden the rest of its time. On a CPU times are wall-clock
times of the host; on a GPU they come from events on the compute stream. Durations of things that run at once must not
be added up: they are unions and intersections of intervals. `overlap_ab.py` records steps.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from threefold.engine.dist.collectives import CallListener, CollectiveCall, observe_collectives
from threefold.engine.schedule.autograd_nodes import observe_nodes

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
    overlaps, left, right = [], union(one), union(other)
    while left and right:
        start, end = max(left[0][0], right[0][0]), min(left[0][1], right[0][1])
        if start < end:
            overlaps.append((start, end))
        (left if left[0][1] < right[0][1] else right).pop(0)
    return overlaps


# The phase of an exchange by the part and name of the graph node that starts it.
_PHASES = {
    ("forward", "attention"): "counts",
    ("forward", "dispatch"): "dispatch",
    ("forward", "combine"): "combine",
    ("backward", "experts"): "dispatch gradient",
}
# Exchanges that any other backward node starts.
_BACKWARD = "combine gradient"


class HostClock:
    """Times of the host, for ranks on the CPU."""

    def now(self) -> float:
        return time.perf_counter()

    def when_done(self, work: Any, tell: Callable[[Any], None]) -> None:
        work.get_future().then(lambda _: tell(time.perf_counter()))

    def seconds(self, mark: float) -> float:
        return mark


class DeviceClock:
    """CUDA events on the compute stream, which are read when the step is over."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.side = device, torch.cuda.Stream(device)
        self.zero = self.now()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def when_done(self, work: Any, tell: Callable[[Any], None]) -> None:
        with torch.cuda.stream(self.side):
            work.wait()
            tell(self.now())

    def seconds(self, mark: Any) -> float:
        mark.synchronize()
        return float(self.zero.elapsed_time(mark)) / 1e3


@dataclass
class Exchange(CallListener):
    """Times of one exchange, as the clock records them, in the order they happen."""

    phase: str
    layer: str
    num_bytes: int
    clock: Any
    start: Any
    done: Any = None  # the transfer ended
    wanted: Any = None  # some code began to wait
    got: Any = None  # that code continued

    def on_start(self, work: Any) -> None:
        self.clock.when_done(work, self._done)

    def _done(self, mark: Any) -> None:
        self.done = mark

    def on_wait(self) -> None:
        if self.wanted is None:
            self.wanted = self.clock.now()

    def on_end(self) -> None:
        self.got = self.clock.now()

    @property
    def under_way(self) -> Interval:
        # The callback at the end may run late; code that waited continued in time.
        ends = [self.clock.seconds(mark) for mark in (self.done, self.got) if mark is not None]
        return self.clock.seconds(self.start), min(ends)

    @property
    def waited(self) -> Interval:
        return self.clock.seconds(self.wanted), self.clock.seconds(self.got)


@dataclass(frozen=True)
class StepExchanges:
    """The exchanges of one step."""

    step_seconds: float
    exchange_seconds: float  # in which at least one exchange was under way
    exposed_seconds: float  # of those, the seconds in which compute waited
    exposed: dict[tuple[str, str], float]  # exposed seconds by layer and phase
    num_bytes: int

    @property
    def hidden(self) -> float:
        return 1 - self.exposed_seconds / self.exchange_seconds if self.exchange_seconds else 0.0


class ExchangeRecorder:
    """Records the exchanges of steps."""

    def __init__(self, device: torch.device) -> None:
        self.clock: Any = DeviceClock(device) if device.type == "cuda" else HostClock()
        self.exchanges: list[Exchange] = []
        self._node = "", "", ""

    @contextmanager
    def step(self) -> Iterator[list[StepExchanges]]:
        """Record one step; the list holds its `StepExchanges` after the `with` block."""
        exchanges: list[StepExchanges] = []
        self.exchanges = []
        start = self.clock.now()
        with observe_collectives(self._observe), observe_nodes(self._enter_node):
            yield exchanges
        exchanges.append(self._summarize((self.clock.seconds(start), self.clock.seconds(self.clock.now()))))

    def _observe(self, call: CollectiveCall) -> CallListener | None:
        if call.operation != "all_to_all" or call.group.name != "ep":
            return None
        part, name, layer = self._node
        phase = _PHASES.get((part, name), _BACKWARD if part == "backward" else "all")
        exchange = Exchange(phase, layer, call.num_bytes, self.clock, self.clock.now())
        self.exchanges.append(exchange)
        return exchange

    @contextmanager
    def _enter_node(self, part: str, name: str, layer: str) -> Iterator[None]:
        before, self._node = self._node, (part, name, layer)
        try:
            yield
        finally:
            self._node = before

    def _summarize(self, step: Interval) -> StepExchanges:
        under_way = union(exchange.under_way for exchange in self.exchanges)
        waited = [exchange.waited for exchange in self.exchanges if exchange.got is not None]
        exposed: dict[tuple[str, str], float] = {}
        for exchange in self.exchanges:
            if exchange.got is not None:
                key = exchange.layer, exchange.phase
                lost = total_length(intersection([exchange.under_way], [exchange.waited]))
                exposed[key] = exposed.get(key, 0.0) + lost
        return StepExchanges(
            step[1] - step[0],
            total_length(under_way),
            total_length(intersection(under_way, waited)),
            exposed,
            sum(exchange.num_bytes for exchange in self.exchanges),
        )
