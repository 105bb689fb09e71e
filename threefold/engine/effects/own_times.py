"""The time that each rank itself needs for a step, without its waits for other ranks, and which ranks are slow by it.

All ranks take equally long for a step, because they wait for each other. What tells a slow rank is its own time: the
step's wall-clock time minus the time in which it waited in collectives and pipeline transfers. On a GPU a wait lasts
from the moment at which the compute stream reaches it to the moment at which the stream continues, between two CUDA
events. `recorder.py` measures the steps that are logged; ranks compare their medians once, at the end of the run.

Collectives of FSDP and of the packages DeepEP and HybridEP are not seen: their waits count as a rank's own time.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from threefold.engine.context import override

SLOW_FACTOR = 1.1  # a rank is slow whose own time is more than this times the median of its peers
SURE_ERRORS = 3.0  # and further above it than this many standard errors of the two medians
_MOST_STEPS = 1000  # the newest steps, whose own times are kept


class WaitTimer:
    """Adds up the waits of one step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.host_seconds = device, 0.0
        self._events: list[tuple[Any, Any]] = []

    def measure(self) -> AbstractContextManager[None]:
        """Inside the `with` block every wait for other ranks is measured."""
        return override("wait_timer", self._wait)

    @contextmanager
    def _wait(self) -> Iterator[None]:
        if self.device.type != "cuda":
            began = time.perf_counter()
            yield
            self.host_seconds += time.perf_counter() - began
            return
        if torch.cuda.is_current_stream_capturing():  # a graph would record the events
            yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(self.device))
        yield
        end.record(torch.cuda.current_stream(self.device))
        self._events.append((start, end))

    def seconds(self) -> float:
        """The sum, at the end of a step, when the host has waited for the device anyway."""
        for _, end in self._events:
            end.synchronize()
        return self.host_seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3


class OwnTimes:
    """A rank's own times of the steps that are measured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: deque[float] = deque(maxlen=_MOST_STEPS)
        self._timer: WaitTimer | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step that is measured; `end_step` follows."""
        self._timer = WaitTimer(self.device)
        with self._timer.measure():
            yield

    def end_step(self, step_seconds: float) -> None:
        """Take the wall-clock time of the step, if it was measured."""
        timer, self._timer = self._timer, None
        if timer is not None:
            self._seconds.append(max(0.0, step_seconds - timer.seconds()))

    def median(self) -> float | None:
        """The median own time of a step; None where none was measured."""
        return statistics.median(self._seconds) if self._seconds else None

    def error(self) -> float:
        """The standard error of that median: of normal times 1.253 sigma / sqrt(n), with sigma 1.483 times the median
        distance from the median."""
        middle = self.median()
        if middle is None:
            return 0.0
        distance = statistics.median(abs(each - middle) for each in self._seconds)
        return 1.253 * 1.483 * distance / math.sqrt(len(self._seconds))

    @property
    def num_steps(self) -> int:
        return len(self._seconds)


@dataclass(frozen=True, slots=True)
class RankTime:
    """The median own time of one rank."""

    rank: int
    host: str
    stage: int  # its coordinate along the pipeline: other stages have other work
    own_seconds: float
    error_seconds: float = 0.0  # standard error of that median


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slower than its peers."""

    time: RankTime
    median_seconds: float  # of its peers
    error_seconds: float = 0.0  # standard error of the difference

    def __str__(self) -> str:
        more = 100 * (self.time.own_seconds / self.median_seconds - 1)
        return (
            f"rank {self.time.rank} on {self.time.host} is slow: {self.time.own_seconds:.4g} s of its own a step, "
            f"{more:.0f} % (+- {100 * self.error_seconds / self.median_seconds:.0f} %) above the median of "
            f"{self.median_seconds:.4g} s"
        )


def slow_ranks(times: Sequence[RankTime]) -> list[SlowRank]:
    """Ranks whose own time is more than 10 % above the median of the ranks of their pipeline stage, slowest first.

    A difference within the noise of the steps does not count. The median of an even number of ranks is the lower of the
    middle two: of two ranks one can be slow. Where no stage has two ranks, all ranks are compared.
    """
    stages = {time.stage for time in times}
    peers = [[time for time in times if time.stage == stage] for stage in sorted(stages)]
    if all(len(row) == 1 for row in peers):
        peers = [list(times)]
    results = []
    for row in peers:
        middle = sorted(row, key=lambda time: time.own_seconds)[(len(row) - 1) // 2]
        median = middle.own_seconds
        for rank_time in row:
            error = math.hypot(rank_time.error_seconds, middle.error_seconds)
            limit = max(SLOW_FACTOR * median, median + SURE_ERRORS * error)
            if median > 0 and limit < rank_time.own_seconds:
                results.append(SlowRank(rank_time, median, error))
    return sorted(results, key=lambda slow: slow.time.own_seconds / slow.median_seconds, reverse=True)
