"""Where the time of each step of a device goes, and why no compute kernel runs in the rest of it.

A step is busy while any operation of the device runs, else idle. Compute busy is inside non-communication busy, which
is inside busy, which is inside the step. The time without a compute kernel (compute-absent) has three causes, gap by
gap, by the compute kernel that ends the gap:

- launch-starved: the host had not issued that kernel yet;
- blocking: it was issued, and an operation that it had to wait for was still running;
- dependency-stalled: it was issued, and nothing is known that held it up.

Kernels that a CUDA graph replays share one launch, so that gaps inside a replay are unresolved: neither the host nor a
call site is blamed. So is a gap whose next kernel has no launch in the trace. On ranks of CPUs the host is the device:
a collective blocks it, and the rest is the host's. `measure_steps` is called for each device of each trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median

import numpy as np

from threefold.profile.classify import Classified
from threefold.profile.intervals import Union, clip, intersect, outside, subtract, union
from threefold.profile.kernel_names import COMPUTE, SYNC_CALLS
from threefold.profile.steps.taxonomy import KINDS, NETWORK, PACKING, ROUTING, library_of
from threefold.profile.steps.windows import StepWindows, Window, of_process
from threefold.profile.trace import Floats, Ints, Trace

MOST_RESIDUAL = 0.5e-3  # seconds of a step's compute-absent time that its causes may leave over


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Seconds of one step of one device."""

    step: float
    busy: float
    idle: float
    non_communication_busy: float
    communication_busy: float
    compute_busy: float
    compute_absent: float
    busy_without_compute: float
    packing: float
    routing: float
    exposed: float  # communication under no other operation: an upper bound of what hiding it could save
    launch_starved: float
    starved_in_sync: float  # part of it in which the host itself waited for the device
    blocking: float
    dependency_stalled: float
    unresolved: float
    residual: float  # of compute-absent time, which the causes do not explain

    def disorder(self, tolerance: float = 1e-9) -> list[str]:
        """Which of the relations that always hold does not."""
        order = (self.compute_busy, self.non_communication_busy, self.busy, self.step)
        checks = {
            "compute <= non-communication <= busy <= step": all(
                one <= other + tolerance for one, other in pairwise(order)
            ),
            "busy + idle = step": abs(self.busy + self.idle - self.step) <= tolerance,
            f"causes add up within {MOST_RESIDUAL * 1e3} ms": abs(self.residual) <= MOST_RESIDUAL,
        }
        return [said for said, holds in checks.items() if not holds]


NAMES = tuple(field.name for field in fields(StepBudget))


@dataclass(frozen=True, slots=True)
class Spread:
    """One number over the steps that count."""

    median: float
    least: float
    most: float
    count: int


@dataclass(frozen=True, slots=True)
class Causes:
    """The gaps between compute kernels of a whole trace, by cause."""

    launch_starved: Union
    blocking: Union
    dependency_stalled: Union
    unresolved: Union
    blocked_by: Mapping[str, Union]  # parts of `blocking` by what was waited for: "NCCL ep", "Memcpy HtoD"


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """The steps of one device, each with its budget."""

    windows: StepWindows
    budgets: tuple[StepBudget, ...]
    causes: Causes
    exposed: Union

    def spread(self, name: str) -> Spread:
        values = [float(getattr(budget, name)) for budget in self.budgets]
        return Spread(median(values), min(values), max(values), len(values))

    def per_step(self, times: Union) -> float:
        """The median seconds of some times in a step."""
        return median(clip(times, window.start, window.end).seconds for window in self.windows.windows)


def measure_steps(trace: Trace, found: Classified, chosen: Ints, kinds: Ints, windows: StepWindows) -> DeviceSteps:
    """The budget of every step of the device whose events are `chosen`."""
    busy = {name: _union(trace, chosen[kinds[chosen] == place]) for place, name in enumerate(KINDS)}
    whole = _union(trace, chosen)
    others = _union(trace, chosen[kinds[chosen] != KINDS.index(NETWORK)])
    exposed = subtract(busy[NETWORK], others)
    first = min(window.start for window in windows.windows)
    last = max(window.end for window in windows.windows)
    number = int(trace.device_spans.device[chosen[0]])
    is_cpu = trace.devices[number].is_cpu
    absent = outside(busy[COMPUTE], min(first, _first(whole)), max(last, _last(whole)))
    if is_cpu:
        causes = _causes_on_cpu(trace, found, chosen, kinds, absent)
    else:
        causes = _causes(trace, found, chosen, kinds, absent)
    waiting = intersect(causes.launch_starved, _host_waits(trace, trace.devices[number].process))
    parts = (busy, whole, others, exposed, causes, waiting)
    return DeviceSteps(windows, tuple(_budget(window, *parts) for window in windows.windows), causes, exposed)


def _budget(
    window: Window,
    busy: Mapping[str, Union],
    whole: Union,
    others: Union,
    exposed: Union,
    causes: Causes,
    waiting: Union,
) -> StepBudget:
    def inside(times: Union) -> float:
        return clip(times, window.start, window.end).seconds

    reasons = [causes.launch_starved, causes.blocking, causes.dependency_stalled, causes.unresolved]
    starved, blocking, stalled, unresolved = map(inside, reasons)
    compute, all_busy = inside(busy[COMPUTE]), inside(whole)
    absent = outside(busy[COMPUTE], window.start, window.end).seconds
    return StepBudget(
        step=window.seconds,
        busy=all_busy,
        idle=outside(whole, window.start, window.end).seconds,
        non_communication_busy=inside(others),
        communication_busy=inside(busy[NETWORK]),
        compute_busy=compute,
        compute_absent=absent,
        busy_without_compute=all_busy - compute,
        packing=inside(busy[PACKING]),
        routing=inside(busy[ROUTING]),
        exposed=inside(exposed),
        launch_starved=starved,
        starved_in_sync=inside(waiting),
        blocking=blocking,
        dependency_stalled=stalled,
        unresolved=unresolved,
        residual=absent - starved - blocking - stalled - unresolved,
    )


def _causes(trace: Trace, found: Classified, chosen: Ints, kinds: Ints, absent: Union) -> Causes:
    """The causes of a GPU's gaps, by the compute kernel that ends each."""
    spans = trace.device_spans
    kernels = chosen[kinds[chosen] == KINDS.index(COMPUTE)]
    kernels = kernels[spans.end[kernels] > spans.start[kernels]]
    order = kernels[np.lexsort((-spans.end[kernels], spans.start[kernels]))]
    begin, end = absent.start, absent.end
    place = np.searchsorted(spans.start[order], end, side="left")
    has_next = place < len(order)
    following = order[np.minimum(place, len(order) - 1)] if len(order) else np.full(len(end), -1, np.int64)
    issued = np.where(has_next, found.launch_end[following], np.nan) if len(order) else np.full(len(end), np.nan)
    known = np.isfinite(issued)
    if len(order):
        known &= ~_follows_in_replay(trace, found, following)
    ready = np.where(known, np.clip(np.nan_to_num(issued), begin, end), begin)
    producer = last_producers(trace, found.launch_start)[following] if len(order) else following
    producer = np.where(known, producer, -1)
    free = np.where(producer >= 0, spans.end[np.maximum(producer, 0)], begin) if len(spans) else begin
    freed = np.where(known, np.clip(free, ready, end), begin)
    blocked = np.flatnonzero(freed > ready)
    labels = _labels(trace, found, producer[blocked])
    by_producer: dict[str, list[int]] = {}
    for gap, label in zip(blocked.tolist(), labels, strict=True):
        by_producer.setdefault(label, []).append(gap)
    return Causes(
        launch_starved=union(begin[known], ready[known]),
        blocking=union(ready[blocked], freed[blocked]),
        dependency_stalled=union(freed[known], end[known]),
        unresolved=union(begin[~known], end[~known]),
        blocked_by={label: union(ready[gaps], freed[gaps]) for label, gaps in by_producer.items()},
    )


def _follows_in_replay(trace: Trace, found: Classified, kernels: Ints) -> Ints:
    """Whether each kernel is replayed by a graph and is not the first of its replay: that one was launched."""
    spans = trace.device_spans
    replayed = np.flatnonzero(found.is_replayed)
    order = replayed[np.lexsort((spans.start[replayed], spans.correlation[replayed], spans.device[replayed]))]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (spans.correlation[order][1:] != spans.correlation[order][:-1]) | (
        spans.device[order][1:] != spans.device[order][:-1]
    )
    follows = np.zeros(len(spans), bool)
    follows[order[~is_first]] = True
    return np.asarray(follows[kernels])


def _causes_on_cpu(trace: Trace, found: Classified, chosen: Ints, kinds: Ints, absent: Union) -> Causes:
    """A collective blocks the thread that asked for it; in the rest of a gap the host had issued nothing."""
    parts, blocked = dict[str, Union](), Union(np.empty(0), np.empty(0))
    network = chosen[kinds[chosen] == KINDS.index(NETWORK)]
    by_label: dict[str, list[int]] = {}
    for span, label in zip(network.tolist(), _labels(trace, found, network), strict=True):
        by_label.setdefault(label, []).append(span)
    for label, own in by_label.items():
        part = subtract(intersect(absent, _union(trace, np.array(own, np.int64))), blocked)
        parts[label] = part
        blocked = union(np.concatenate([blocked.start, part.start]), np.concatenate([blocked.end, part.end]))
    none = Union(np.empty(0), np.empty(0))
    return Causes(subtract(absent, blocked), blocked, none, none, parts)


def _labels(trace: Trace, found: Classified, producers: Ints) -> list[str]:
    """What each producer is: a library with the axis it serves, a copy with its direction, or a kind of kernel."""
    labels = []
    for span in producers.tolist():
        name = trace.names[int(trace.device_spans.name[span])]
        axis = int(found.axis_of[span]) if len(found.axis_of) else -1
        if axis >= 0:
            labels.append(f"{library_of(name)} {found.axes[axis]}")
        else:
            labels.append(name.partition(" (")[0] if name.startswith("Mem") else name[:60])
    return labels


def _host_waits(trace: Trace, process: int | None) -> Union:
    """Calls of the runtime in which the host waits for the device."""
    matches = np.array([bool(SYNC_CALLS.search(name)) for name in trace.names] or [False])
    calls = of_process(trace, trace.launches, process)
    calls = calls[matches[calls.name]] if len(calls) else calls
    return union(calls.start, calls.end)


def _union(trace: Trace, chosen: Ints) -> Union:
    return union(trace.device_spans.start[chosen], trace.device_spans.end[chosen])


def _first(times: Union) -> float:
    return float(times.start[0]) if len(times) else np.inf


def _last(times: Union) -> float:
    return float(times.end[-1]) if len(times) else -np.inf


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
