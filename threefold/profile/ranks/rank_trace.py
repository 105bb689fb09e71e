"""What one rank's trace contributes to the analysis of a job: small enough that hundreds of ranks fit in memory.

A copy is a bottleneck only where its stream is full of them or compute waits for it, so both are stated.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from threefold.layout.degrees import Layout
from threefold.profile.axes import UNKNOWN_AXIS, completed
from threefold.profile.classify import Classified
from threefold.profile.intervals import Union, clip, union
from threefold.profile.kernel_names import COLLECTIVE_KINDS, COPY, collective_kind
from threefold.profile.steps.budget import DeviceSteps, measure_steps
from threefold.profile.steps.taxonomy import KINDS, NETWORK, LibraryUse, inventory, kinds_of
from threefold.profile.steps.windows import find_steps
from threefold.profile.trace import COPY as COPY_EVENT
from threefold.profile.trace import Capture, Collective, Floats, Ints, Trace

_DIRECTION = re.compile(r"\b([HDP]to[HDP])\b")
FULL = 0.9  # of the step, from which a stream of copies is full


@dataclass(frozen=True, slots=True)
class CopyUse:
    """Copies in one direction on one stream, per step."""

    direction: str  # "HtoD", "DtoH", "DtoD", "PtoP" or "Memset"
    stream: int
    count: float
    num_bytes: float | None  # None where the trace does not say
    seconds: float
    share: float  # of the step
    is_pinned: bool | None  # of host memory; None where the trace does not say, or no host memory takes part
    blocking_seconds: float  # compute waited for copies of this direction, on any stream

    @property
    def bytes_per_second(self) -> float | None:
        return self.num_bytes / self.seconds if self.num_bytes and self.seconds else None

    @property
    def is_bottleneck(self) -> bool:
        return self.share >= FULL or self.blocking_seconds > 0


def copies_of(trace: Trace, chosen: Ints, kinds: Ints, steps: DeviceSteps) -> list[CopyUse]:
    """The copies of a device inside its steps, longest first."""
    spans = trace.device_spans
    own = chosen[(kinds[chosen] == KINDS.index(COPY)) & (spans.kind[chosen] == COPY_EVENT)]
    is_inside = [(spans.start[own] < one.end) & (spans.end[own] > one.start) for one in steps.windows.windows]
    own = own[np.logical_or.reduce(is_inside)]
    directions = np.array([_direction(name) for name in trace.names] or [""])[spans.name[own]]
    found = []
    for direction, stream in sorted(set(zip(directions.tolist(), spans.stream[own].tolist(), strict=True))):
        part = own[(directions == direction) & (spans.stream[own] == stream)]
        found.append(_use(trace, part, direction, stream, steps))
    return sorted(found, key=lambda one: -one.seconds)


def _use(trace: Trace, part: Ints, direction: str, stream: int, steps: DeviceSteps) -> CopyUse:
    spans, windows = trace.device_spans, steps.windows.windows
    num_steps, total = len(windows), sum(window.seconds for window in windows)

    def inside(times: Union) -> float:
        return sum(clip(times, window.start, window.end).seconds for window in windows)

    seconds, sizes = inside(union(spans.start[part], spans.end[part])), spans.num_bytes[part]
    blocked_by = {label: times for label, times in steps.causes.blocked_by.items() if label.startswith("Mem")}
    return CopyUse(
        direction=direction,
        stream=stream,
        count=len(part) / num_steps,
        num_bytes=float(sizes.sum(dtype=np.float64)) / num_steps if (sizes >= 0).all() else None,
        seconds=seconds / num_steps,
        share=seconds / total if total else 0.0,
        is_pinned=_is_pinned({trace.names[name] for name in spans.name[part].tolist()}),
        blocking_seconds=sum(inside(one) for label, one in blocked_by.items() if _direction(label) == direction)
        / num_steps,
    )


def _direction(name: str) -> str:
    match = _DIRECTION.search(name)
    return match[1] if match else "Memset" if "set" in name.lower() else "copy"


def _is_pinned(names: set[str]) -> bool | None:
    """Whether host memory was pinned, by the names of the copies: "Memcpy HtoD (Pinned -> Device)"."""
    if any("Pageable" in name for name in names):
        return False
    return True if any("Pinned" in name for name in names) else None


MAX_COLLECTIVES = 200_000  # of one rank that are kept for matching
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Group:
    """A kind of collective among certain ranks. `ranks` is empty where the trace does not say them."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    name: str  # of the process group, where ranks are unknown
    is_stated: bool  # whether the trace itself says the ranks; else the plan does, or nothing


@dataclass(slots=True)
class Collectives:
    """The collectives of a rank in the order in which it issued them."""

    groups: list[Group]
    group: Ints  # index into `groups`
    start: Floats
    end: Floats
    step: Ints  # index of the step window in which it was issued, -1 outside of all
    num_point_to_point: int  # messages between two ranks, which are not matched
    num_left_out: int  # beyond `MAX_COLLECTIVES`


@dataclass(slots=True)
class RankTrace:
    """One device of one trace."""

    name: str
    path: Path
    rank: int | None
    is_cpu: bool
    capture: Capture
    steps: DeviceSteps
    libraries: Mapping[str, LibraryUse]
    copies: list[CopyUse]
    copy_seconds: float  # of a step, in which a copy runs
    collectives: Collectives
    link_rate: float  # share of the kernels whose launch the trace has
    has_waits: bool  # whether waits between streams were recorded
    num_replayed: int  # kernels that graphs replay
    num_kernels: int


def rank_traces(
    trace: Trace, found: Classified, layout: Layout | None, step_range: str | None = None
) -> list[RankTrace]:
    """The contribution of every device of a trace that `measure.py` has classified."""
    kinds = kinds_of(trace, found)
    devices = np.unique(trace.device_spans.device).tolist()
    return [_rank(trace, found, kinds, int(number), len(devices), layout, step_range) for number in devices]


def _rank(
    trace: Trace,
    found: Classified,
    kinds: Ints,
    number: int,
    num_devices: int,
    layout: Layout | None,
    step_range: str | None,
) -> RankTrace:
    chosen = np.flatnonzero(trace.device_spans.device == number)
    device = trace.devices[number]
    windows = find_steps(trace, number, chosen, step_range)
    steps = measure_steps(trace, found, chosen, kinds, windows)
    copies = copies_of(trace, chosen, kinds, steps)
    rank = trace.rank if num_devices == 1 else None  # a file of several devices has one rank at most
    return RankTrace(
        name=f"rank {rank}" if rank is not None else f"{trace.path.name[:40]} {device.key}",
        path=trace.path,
        rank=rank,
        is_cpu=device.is_cpu,
        capture=trace.capture,
        steps=steps,
        libraries=inventory(trace, chosen, kinds),
        copies=copies,
        copy_seconds=sum(one.seconds for one in copies),
        collectives=_collectives(trace, found, chosen[kinds[chosen] == KINDS.index(NETWORK)], steps, layout),
        link_rate=1.0 if device.is_cpu else float(np.mean(np.isfinite(found.launch_start[chosen]))),
        has_waits=len(trace.waits) > 0,
        num_replayed=int(np.sum(found.is_replayed[chosen])),
        num_kernels=len(chosen),
    )


def _collectives(
    trace: Trace, found: Classified, network: Ints, steps: DeviceSteps, layout: Layout | None
) -> Collectives:
    spans = trace.device_spans
    issued = np.where(np.isnan(found.launch_start[network]), spans.start[network], found.launch_start[network])
    order = np.lexsort((spans.start[network], issued))
    network, issued = network[order][:MAX_COLLECTIVES], issued[order][:MAX_COLLECTIVES]
    groups: dict[Group, int] = {}
    known: dict[tuple[int, int, int], int] = {}
    group, num_messages = np.full(len(network), -1, np.int64), 0
    columns = (spans.collective[network], found.operator_link[network], spans.name[network], found.axis_of[network])
    for place, (said, link, name, axis) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        said = said if said >= 0 else trace.operator_collectives.get(link, -1)
        key = (said, name, axis)
        if key not in known:
            one = _group(trace, *key, found.axes, layout)
            known[key] = -1 if one.kind in _POINT_TO_POINT and one.ranks else groups.setdefault(one, len(groups))
        group[place] = known[key]
        num_messages += known[key] < 0
    kept = group >= 0
    starts = np.array([window.start for window in steps.windows.windows])
    ends = np.array([window.end for window in steps.windows.windows])
    step = np.searchsorted(starts, issued, side="right") - 1
    step = np.where((step >= 0) & (issued < ends[np.maximum(step, 0)]), step, -1)
    return Collectives(
        list(groups), group[kept], spans.start[network][kept], spans.end[network][kept], step[kept], num_messages,
        len(order) - len(network),
    )  # fmt: skip


def _group(trace: Trace, said: int, name: int, axis: int, axes: list[str], layout: Layout | None) -> Group:
    """The group of a collective: from its own arguments, else from the plan, else the only group of the job."""
    meta = completed(trace, trace.collectives[said] if said >= 0 else Collective())
    number = collective_kind(meta.operation or trace.names[name])
    kind = COLLECTIVE_KINDS[number] if number >= 0 else (meta.operation or trace.names[name])[:60]
    label = axes[axis] if axis >= 0 else UNKNOWN_AXIS
    ranks = meta.ranks
    if not ranks and said < 0 and len(distinct := {one.ranks for one in trace.groups.values()}) == 1:
        ranks = next(iter(distinct))
    is_planned = not ranks and layout is not None and trace.rank is not None and label != UNKNOWN_AXIS
    if is_planned and layout is not None and trace.rank is not None and trace.rank < layout.gpus:
        ranks = layout.group(label, trace.rank)
    return Group(kind, label, tuple(sorted(ranks)), "" if ranks else meta.group_name, bool(ranks) and not is_planned)
