"""Names the wall that holds a device back, how sure that is, and the evidence in sentences.

Memory is the wall where the card is nearly full, as in `threefold estimate`. Else each kind of time is divided by the
share of the span from which it is a wall (as in an estimate), and the largest is the wall: a third of the span in
exposed communication weighs more than half of it in compute. `analyze.py` calls `diagnose`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from threefold.cost.estimate import MEMORY_BOUND, WALL_SHARES
from threefold.plan.plan import Plan
from threefold.profile.measure import DeviceWalls
from threefold.profile.readers.run_folder import RunLog
from threefold.units import format_bytes, format_many

UNKNOWN_SHARE = 0.5  # of the span in unknown kernels, from which nothing else can be told
STRAGGLER = 1.05  # a rank's own time over the median, from which it is slow
LEAST_STEP_SECONDS = 0.05  # of a step: of shorter ones the noise of a host is a larger part
LOW_EFFICIENCY = 0.6  # of what shapes attain, below which kernels are to blame
MIN_ALLOCATED = 0.75  # of the capacity, below which reserved memory is the allocator's cache and no need


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slow by its own time: its span without exposed communication, in which it waits for others."""

    device: str
    own_seconds: float
    over_median: float


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory of a device: what was used at the peak, what it has, and where both are known from."""

    peak_bytes: int | None
    capacity_bytes: int | None
    is_full: bool
    source: str

    @property
    def headroom_bytes(self) -> int | None:
        known = self.peak_bytes is not None and self.capacity_bytes is not None
        return (self.capacity_bytes or 0) - (self.peak_bytes or 0) if known else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    dominant: str  # "memory", "communication", "host", "compute" or "unknown"
    confidence: float
    evidence: dict[str, list[str]]  # by wall
    memory: MemoryRoom


def diagnose(walls: DeviceWalls, others: Sequence[Straggler], plan: Plan | None, log: RunLog) -> Diagnosis:
    """The wall of one device. `others` are slow ranks of the whole trace."""
    room = memory_room(walls, plan, log)
    scores = {
        "communication": walls.share(walls.communication.exposed_seconds) / WALL_SHARES["communication"],
        "host": walls.share(walls.host.idle_seconds) / WALL_SHARES["host"],
        "compute": walls.share(walls.compute_seconds) / WALL_SHARES["compute"],
        "unknown": walls.share(walls.unknown_seconds) / UNKNOWN_SHARE,
    }
    first, second = sorted(scores, key=lambda name: -scores[name])[:2]
    dominant = "memory" if room.is_full else first
    margin = (scores[first] - scores[second]) / scores[first] if scores[first] else 0.0
    evidence = {
        "memory": list(_memory_evidence(walls, room, plan)),
        "communication": list(_communication_evidence(walls, others)),
        "host": list(_host_evidence(walls)),
        "compute": list(_compute_evidence(walls, log)),
        "unknown": list(_unknown_evidence(walls)),
    }
    return Diagnosis(dominant, _confidence(walls, dominant, margin), evidence, room)


def _confidence(walls: DeviceWalls, dominant: str, margin: float) -> float:
    """1 where all of the device's time is explained by strong evidence and the wall stands out; 0 for unknown."""
    if dominant == "unknown":
        return 0.0
    busy = walls.busy_seconds or 1.0
    sure = 1 - walls.unknown_seconds / busy
    sure *= 1 - 0.3 * walls.weak_seconds / busy
    sure *= 1 - walls.num_unended / (walls.num_events + walls.num_unended)
    if dominant != "memory":
        sure *= 0.6 + 0.4 * min(1.0, margin / 0.3)
    if dominant == "host" and not walls.host.has_launches:
        sure *= 0.7  # idle time is there, and nothing says who caused it
    return round(max(0.0, min(1.0, sure)), 3)


def memory_room(walls: DeviceWalls, plan: Plan | None, log: RunLog) -> MemoryRoom:
    """From the trace's memory events, else the run's own peak; capacity from the trace, the chip or the plan."""
    if walls.device.is_cpu:
        return MemoryRoom(log.peak_bytes, None, False, "resident memory of the run" if log.peak_bytes else "unknown")
    allocated = walls.memory.allocated_bytes or log.peak_bytes or 0
    peak = max(walls.memory.reserved_bytes, allocated)
    chip = walls.chip or (plan.chip if plan and plan.chip.architecture != "cpu" else None)
    capacity = walls.device.memory_bytes or (chip.memory_bytes if chip else 0)
    source = "memory events of the trace" if walls.memory.allocated_bytes else "peak of the run" if peak else "unknown"
    is_near = bool(peak and capacity) and peak > MEMORY_BOUND * capacity
    is_full = is_near and (allocated > MIN_ALLOCATED * capacity or walls.allocator_calls > 0)
    return MemoryRoom(peak or None, capacity or None, is_full, source)


def stragglers(devices: Sequence[DeviceWalls]) -> list[Straggler]:
    """Ranks whose own time is longer than the median rank's, slowest first. Short steps prove nothing."""
    if len(devices) < 2 or any((walls.step_seconds or LEAST_STEP_SECONDS) < LEAST_STEP_SECONDS for walls in devices):
        return []
    own = [walls.span_seconds - walls.communication.exposed_seconds for walls in devices]
    middle = median(own)
    slow = [
        Straggler(walls.name, seconds, seconds / middle)
        for walls, seconds in zip(devices, own, strict=True)
        if middle > 0 and seconds > STRAGGLER * middle
    ]
    return sorted(slow, key=lambda one: -one.over_median)


def _memory_evidence(walls: DeviceWalls, room: MemoryRoom, plan: Plan | None) -> Iterator[str]:
    if room.peak_bytes and room.capacity_bytes:
        used = room.peak_bytes / room.capacity_bytes
        yield (
            f"{format_bytes(room.peak_bytes)} of {format_bytes(room.capacity_bytes)} are used at the peak ({used:.0%}, "
            f"by {room.source})"
        )
    elif room.peak_bytes:
        yield f"{format_bytes(room.peak_bytes)} are used at the peak ({room.source})"
    else:
        yield "nothing says how much memory was used: record with profile_memory=True"
    if walls.allocator_calls:
        calls = format_many(walls.allocator_calls, "call")
        yield f"{calls} of the CUDA allocator in the window take {walls.allocator_seconds:.3f} s: none is normal"
    if plan and plan.full_recompute:
        yield "the plan recomputes whole layers, which pays for memory with time"


def _communication_evidence(walls: DeviceWalls, others: Sequence[Straggler]) -> Iterator[str]:
    found = walls.communication
    if not found.total_seconds:
        yield "no communication kernel was seen"
        return
    yield (
        f"communication takes {found.total_seconds:.4g} s; no compute covers {found.exposed_seconds:.4g} s of it, "
        f"{walls.share(found.exposed_seconds):.0%} of the span"
    )
    if walls.by_axis:
        axis, worst = next(iter(walls.by_axis.items()))
        yield f"most of the exposed time is {axis}: {worst.exposed_seconds:.4g} s"
    for slow in others[:3]:
        yield f"{slow.device} takes {slow.over_median:.2f} times the median's own time, and the others wait for it"


def _host_evidence(walls: DeviceWalls) -> Iterator[str]:
    host = walls.host
    yield (
        f"the device is idle for {host.idle_seconds:.4g} s ({walls.share(host.idle_seconds):.0%} of the span) in "
        f"{format_many(host.num_gaps, 'gap')}, the longest of {host.longest_gap_seconds * 1e3:.3g} ms"
    )
    if not host.has_launches:
        yield "the trace has no runtime calls, so nothing says whether the host was late"
    elif host.idle_seconds:
        yield f"in {host.host_bound_seconds:.4g} s of it the host had not yet launched the next kernel"
    if host.sync_seconds:
        yield f"the host waits {host.sync_seconds:.4g} s in calls that synchronize"


def _compute_evidence(walls: DeviceWalls, log: RunLog) -> Iterator[str]:
    yield f"compute kernels run for {walls.compute_seconds:.4g} s, {walls.share(walls.compute_seconds):.0%} of the span"
    if walls.gemm:
        said = f"matrix multiplications of known shape reach {walls.gemm.efficiency:.0%} of what their shapes attain"
        low = " (low: fused or grouped kernels, or other tiles)" if walls.gemm.efficiency < LOW_EFFICIENCY else ""
        yield f"{said}{low}; the shapes themselves allow {walls.gemm.shape_limit:.0%} of the dense peak"
    if walls.median_kernel_seconds is not None:
        yield f"the median compute kernel lasts {walls.median_kernel_seconds * 1e6:.3g} us"
    if log.expert_imbalance:
        yield f"the busiest expert rank (without EP: expert) has {log.expert_imbalance:.2f} times the mean load"


def _unknown_evidence(walls: DeviceWalls) -> Iterator[str]:
    if walls.unknown_seconds:
        names = ", ".join(repr(name if len(name) <= 60 else name[:57] + "...") for name in walls.unknown_names)
        yield f"{walls.unknown_seconds:.4g} s are spent in kernels that nothing explains: {names}"
    if walls.num_unended:
        yield f"{format_many(walls.num_unended, 'device event')} without an end were left out"
