"""Walls of one device: communication, host, compute and unknown time, as unions of intervals.

Definitions, for each device: communication is the union of its communication kernels; exposed is the part of that union
that no compute kernel of any stream covers, so that copies, unknown kernels and idle time hide nothing; the span runs
from the first to the last device event. Idle time belongs to the host: it is host-bound while the launch of the next
kernel was not done, and a launch gap afterwards. `analyze.py` calls `measure_devices`.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from threefold.layout.degrees import Layout
from threefold.profile.axes import axes_of
from threefold.profile.classify import EVIDENCE, Classified, classify
from threefold.profile.gemm_efficiency import GemmEfficiency, gemm_efficiency
from threefold.profile.intervals import Union, gaps, subtract, union
from threefold.profile.kernel_names import CLASSES, COMMUNICATION, COMPUTE, SYNC_CALLS, UNKNOWN, compute_family
from threefold.profile.trace import Device, Ints, MemoryUse, Trace
from threefold.spec.chips import ChipSpec, chip_of_device

_ALLOCATOR = re.compile(r"^(cuda|hip)(Malloc|Free)(?!Host|Async)|^cuMem(Create|Unmap|Release)")
_DIRECTIONS = {"host to device": "HtoD", "device to host": "DtoH"}  # words in names of copies
MAX_NAMES = 5  # unknown kernels that are named


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication that was under way, and how much of it nothing hid."""

    total_seconds: float
    exposed_seconds: float

    @property
    def hidden_fraction(self) -> float | None:
        return 1 - self.exposed_seconds / self.total_seconds if self.total_seconds else None


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Copies in one direction between host and device, such as those of offload."""

    num_bytes: int
    total_seconds: float
    exposed_seconds: float  # no compute kernel ran meanwhile

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.total_seconds if self.total_seconds else 0.0


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds in which the device had nothing to run."""

    idle_seconds: float
    host_bound_seconds: float  # the launch of the next kernel was not done yet
    launch_gap_seconds: float  # the rest: latency of a launch, or a dependency
    num_gaps: int
    longest_gap_seconds: float
    sync_seconds: float  # the host waited for the device in a call of the runtime
    num_launches: int
    has_launches: bool  # whether the trace says when kernels were launched


@dataclass(slots=True)
class DeviceWalls:
    """What one device did in a trace."""

    path: Path
    rank: int | None
    device: Device
    span_seconds: float
    busy_seconds: float
    communication: Overlap
    by_axis: dict[str, Overlap]
    links: dict[str, LinkUse]  # by direction
    host: HostTime
    compute_seconds: float
    compute_by_kind: dict[str, float]
    by_region: dict[str, float]
    median_kernel_seconds: float | None
    gemm: GemmEfficiency | None
    unknown_seconds: float
    unknown_names: dict[str, float]
    weak_seconds: float  # seconds whose class rests on the module's range alone
    num_events: int
    num_unended: int
    memory: MemoryUse
    allocator_calls: int
    allocator_seconds: float
    num_steps: int
    step_seconds: float | None
    chip: ChipSpec | None
    exposed: Union = field(repr=False)
    idle: Union = field(repr=False)
    spans: Ints = field(repr=False)  # of the trace's device spans

    @property
    def name(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank} "
        return f"{rank}{self.device.key}"

    def share(self, seconds: float) -> float:
        return seconds / self.span_seconds if self.span_seconds else 0.0


def measure_devices(
    trace: Trace, layout: Layout | None = None, chip: ChipSpec | None = None
) -> tuple[list[DeviceWalls], Classified]:
    """The walls of every device that has events. `chip` stands in where the trace does not name a known one."""
    found = classify(trace)
    found.axes, found.axis_of = axes_of(trace, found, layout)
    steps = _steps(trace)
    devices = []
    for number in np.unique(trace.device_spans.device).tolist():
        chosen = np.flatnonzero(trace.device_spans.device == number)
        devices.append(_measure(trace, found, int(number), chosen, steps, chip))
    return devices, found


def _measure(
    trace: Trace,
    found: Classified,
    number: int,
    chosen: Ints,
    steps: tuple[int, float | None],
    chip: ChipSpec | None,
) -> DeviceWalls:
    spans, device = trace.device_spans, trace.devices[number]
    label = found.label[chosen]
    parts = {name: _union(trace, chosen[label == place]) for place, name in enumerate(CLASSES)}
    compute, busy = parts[COMPUTE], _union(trace, chosen)
    exposed = subtract(parts[COMMUNICATION], compute)
    by_axis = {}
    for place, axis in enumerate(found.axes):
        own = _union(trace, chosen[found.axis_of[chosen] == place])
        if len(own):
            by_axis[axis] = Overlap(own.seconds, subtract(own, compute).seconds)
    kernels = chosen[label == CLASSES.index(COMPUTE)]
    known_chip = None if device.is_cpu else chip_of_device(device.name) or chip
    is_weak = found.evidence[chosen] == EVIDENCE.index("region")
    calls, seconds = _allocator_calls(trace)
    return DeviceWalls(
        path=trace.path,
        rank=trace.rank,
        device=device,
        span_seconds=float(spans.end[chosen].max() - spans.start[chosen].min()),
        busy_seconds=busy.seconds,
        communication=Overlap(parts[COMMUNICATION].seconds, exposed.seconds),
        by_axis=dict(sorted(by_axis.items(), key=lambda item: -item[1].exposed_seconds)),
        links=_links(trace, chosen, compute),
        host=_host_time(trace, found, chosen, busy, device.is_cpu),
        compute_seconds=compute.seconds,
        compute_by_kind=_by_kind(trace, kernels),
        by_region=_by_region(trace, found, chosen),
        median_kernel_seconds=float(np.median((spans.end - spans.start)[kernels])) if len(kernels) else None,
        gemm=gemm_efficiency(trace, found, chosen, known_chip) if known_chip else None,
        unknown_seconds=parts[UNKNOWN].seconds,
        unknown_names=_longest_names(trace, chosen[label == CLASSES.index(UNKNOWN)]),
        weak_seconds=_union(trace, chosen[is_weak]).seconds,
        num_events=len(chosen),
        num_unended=trace.num_unended,
        memory=trace.memory.get(number, MemoryUse()),
        allocator_calls=calls,
        allocator_seconds=seconds,
        num_steps=steps[0],
        step_seconds=steps[1],
        chip=known_chip,
        exposed=exposed,
        idle=gaps(busy),
        spans=chosen,
    )


def _union(trace: Trace, chosen: Ints) -> Union:
    return union(trace.device_spans.start[chosen], trace.device_spans.end[chosen])


def _links(trace: Trace, chosen: Ints, compute: Union) -> dict[str, LinkUse]:
    """What each direction between host and device carried, where the trace tells bytes."""
    found = {}
    for direction, word in _DIRECTIONS.items():
        goes_there = np.array([word in name for name in trace.names] or [False])
        copies = chosen[goes_there[trace.device_spans.name[chosen]] & (trace.device_spans.num_bytes[chosen] >= 0)]
        if len(copies):
            moved, time = int(trace.device_spans.num_bytes[copies].sum(dtype=np.float64)), _union(trace, copies)
            found[direction] = LinkUse(moved, time.seconds, subtract(time, compute).seconds)
    return found


def _host_time(trace: Trace, found: Classified, chosen: Ints, busy: Union, is_cpu: bool) -> HostTime:
    """Idle time by its cause. The device waits for the host while the next kernel's launch has not returned."""
    idle, spans = gaps(busy), trace.device_spans
    length = idle.end - idle.start
    order = chosen[np.argsort(spans.start[chosen], kind="stable")]
    place = np.searchsorted(spans.start[order], idle.end, side="left")
    launched = found.launch_end[order[np.minimum(place, len(order) - 1)]] if len(idle) else np.empty(0)
    if is_cpu:
        bound, has_launches = length, True
    else:
        bound = np.clip(np.minimum(idle.end, launched) - idle.start, 0.0, None)
        bound, has_launches = np.nan_to_num(bound, nan=0.0), bool(len(trace.launches))
    idle_seconds, bound_seconds = float(length.sum()), float(bound.sum())
    return HostTime(
        idle_seconds=idle_seconds,
        host_bound_seconds=bound_seconds,
        launch_gap_seconds=idle_seconds - bound_seconds,
        num_gaps=len(idle),
        longest_gap_seconds=float(length.max(initial=0.0)),
        sync_seconds=_call_seconds(trace, SYNC_CALLS)[1],
        num_launches=int(np.sum(np.isfinite(found.launch_end[chosen]))),
        has_launches=has_launches,
    )


def _call_seconds(trace: Trace, pattern: re.Pattern[str]) -> tuple[int, float]:
    """Number and seconds of the runtime's calls whose name matches."""
    matches = np.array([bool(pattern.search(name)) for name in trace.names] or [False])
    calls = trace.launches[matches[trace.launches.name]] if len(trace.launches) else trace.launches
    return len(calls), union(calls.start, calls.end).seconds


def _allocator_calls(trace: Trace) -> tuple[int, float]:
    """Calls that ask the driver for memory or give it back: in a steady step there is none."""
    return _call_seconds(trace, _ALLOCATOR)


def _by_kind(trace: Trace, kernels: Ints) -> dict[str, float]:
    """Union of the compute kernels of each family of names."""
    kinds = np.array([("gemm", "attention", "other").index(compute_family(name)) for name in trace.names] or [2])
    kind = kinds[trace.device_spans.name[kernels]]
    found = {name: _union(trace, kernels[kind == place]) for place, name in enumerate(("gemm", "attention", "other"))}
    return {name: part.seconds for name, part in found.items() if len(part)}


def _by_region(trace: Trace, found: Classified, chosen: Ints) -> dict[str, float]:
    """Union of the device events that each module's range launched, largest first."""
    region = found.region[chosen]
    seconds = {
        trace.names[name]: _union(trace, chosen[region == name]).seconds
        for name in np.unique(region[region >= 0]).tolist()[:100]
    }
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _longest_names(trace: Trace, chosen: Ints) -> dict[str, float]:
    """The names that take most of the chosen spans' time, with their seconds."""
    spans = trace.device_spans
    total = np.bincount(spans.name[chosen], (spans.end - spans.start)[chosen]) if len(chosen) else np.empty(0)
    order = np.argsort(-total, kind="stable")[:MAX_NAMES]
    return {trace.names[place]: float(total[place]) for place in order.tolist() if total[place] > 0}


def _steps(trace: Trace) -> tuple[int, float | None]:
    """Number and mean length of the steps that annotations mark; `threefold.step` goes before the profiler's own."""
    for wanted in ("threefold.step", "ProfilerStep#"):
        is_step = np.array([name.startswith(wanted) for name in trace.names] or [False])
        steps = trace.annotations[is_step[trace.annotations.name]] if len(trace.annotations) else trace.annotations
        if len(steps):
            return len(steps), float(np.mean(steps.end - steps.start))
    return 0, None
