"""When exchanges of experts were under way, and when the compute stood still for them.

An exchange is exposed while somebody waits for it, and hidden the rest of its time. Times are the host's on a CPU,
where compute is what the host does, and those of events on the compute stream of a GPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from threefold.engine.overlap.intervals import Interval, common, length, union
from threefold.engine.overlap.nodes import watched
from threefold.engine.shard.collectives import Call, Watch, observed

# What the node that starts an exchange calls it.
_PHASES = {
    ("forward", "attention"): "counts",
    ("forward", "dispatch"): "dispatch",
    ("forward", "combine"): "combine",
    ("backward", "experts"): "dispatch gradient",
}
# Behind whatever node the rows of a layer landed in.
_BACKWARD = "combine gradient"


class HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def when_done(self, work: Any, tell: Callable[[Any], None]) -> None:
        work.get_future().then(lambda _: tell(time.perf_counter()))

    def seconds(self, mark: float) -> float:
        return mark


class DeviceClock:
    """Marks are events; they are read when the step is over."""

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
class Exchange(Watch):
    """Marks of one exchange, in the order of time."""

    phase: str
    layer: str
    num_bytes: int
    clock: Any
    start: Any
    done: Any = None
    wanted: Any = None
    got: Any = None

    def started(self, work: Any) -> None:
        self.clock.when_done(work, self._done)

    def _done(self, mark: Any) -> None:
        self.done = mark

    def waits(self) -> None:
        if self.wanted is None:
            self.wanted = self.clock.now()

    def ended(self) -> None:
        self.got = self.clock.now()

    @property
    def under_way(self) -> Interval:
        # Who tells of the end may be late; who waited for it was not.
        ends = [self.clock.seconds(mark) for mark in (self.done, self.got) if mark is not None]
        return self.clock.seconds(self.start), min(ends)

    @property
    def waited(self) -> Interval:
        return self.clock.seconds(self.wanted), self.clock.seconds(self.got)


@dataclass(frozen=True)
class Seen:
    """Of one step: seconds in which exchanges were under way, and of those the exposed ones, by layer and phase too."""

    step_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    exposed: dict[tuple[str, str], float]
    num_bytes: int

    @property
    def hidden(self) -> float:
        return 1 - self.exposed_seconds / self.exchange_seconds if self.exchange_seconds else 0.0


class Recorder:
    def __init__(self, device: torch.device) -> None:
        self.clock: Any = DeviceClock(device) if device.type == "cuda" else HostClock()
        self.exchanges: list[Exchange] = []
        self._at = "", "", ""

    @contextmanager
    def step(self) -> Iterator[list[Seen]]:
        """What was seen is in the list when the step is over."""
        found: list[Seen] = []
        self.exchanges = []
        start = self.clock.now()
        with observed(self._see), watched(self._node):
            yield found
        found.append(self._sum_up((self.clock.seconds(start), self.clock.seconds(self.clock.now()))))

    def _see(self, call: Call) -> Watch | None:
        if call.operation != "all_to_all" or call.group.name != "ep":
            return None
        part, name, layer = self._at
        phase = _PHASES.get((part, name), _BACKWARD if part == "backward" else "all")
        exchange = Exchange(phase, layer, call.num_bytes, self.clock, self.clock.now())
        self.exchanges.append(exchange)
        return exchange

    @contextmanager
    def _node(self, part: str, name: str, layer: str) -> Iterator[None]:
        before, self._at = self._at, (part, name, layer)
        try:
            yield
        finally:
            self._at = before

    def _sum_up(self, step: Interval) -> Seen:
        under_way = union(exchange.under_way for exchange in self.exchanges)
        waited = [exchange.waited for exchange in self.exchanges if exchange.got is not None]
        exposed: dict[tuple[str, str], float] = {}
        for exchange in self.exchanges:
            if exchange.got is not None:
                key = exchange.layer, exchange.phase
                lost = length(common([exchange.under_way], [exchange.waited]))
                exposed[key] = exposed.get(key, 0.0) + lost
        return Seen(
            step[1] - step[0],
            length(under_way),
            length(common(under_way, waited)),
            exposed,
            sum(exchange.num_bytes for exchange in self.exchanges),
        )
