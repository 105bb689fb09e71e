"""Replays the events of a snapshot: allocated, active and reserved bytes over time, and what was live at the peak.

Allocated counts what programs hold, active also what is freed and still in use by another stream, reserved what the
allocator has from the device: reserved >= active >= allocated. What was there before the recording (the baseline) is
what the end shows and no event made, and what was freed without an event that made it. Sizes are requested bytes; the
allocator rounds them up, so that its own counters are a little higher.
"""

from collections import Counter
from dataclasses import dataclass

from threefold.diagnose.snapshots.snapshot_file import DeviceMemory, Event, Snapshot

_GROWS, _SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
MOST_POINTS = 1000


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes at one moment."""

    allocated: int
    active: int
    reserved: int


@dataclass(frozen=True, slots=True)
class StepPeak:
    """A step of the profiler: its peak is the baseline, what was added before it, and what it adds at most."""

    name: str
    before_bytes: int  # beyond the baseline, when the step begins
    added_bytes: int


@dataclass(slots=True)
class Replay:
    """The history of one device."""

    device: int
    baseline: Level
    peak: Level
    peak_event: int  # index of the event that reaches it, -1 for the baseline itself
    peak_second: float | None  # since the first event
    end: Level
    live: dict[int, tuple[int, int]]  # at the peak, by source: bytes and number of blocks
    unsourced_baseline_bytes: int
    num_events: int
    num_frees: int
    num_unmatched_frees: int
    num_lost: int  # blocks that the end does not have, though nothing freed them
    steps: list[StepPeak]
    points: list[tuple[int, int, int]]  # microseconds, allocated and reserved bytes: the highest of equal intervals
    oom: Event | None

    @property
    def fragments(self) -> float:
        """The share of reserved memory that is not active at the peak."""
        return 1 - self.peak.active / self.peak.reserved if self.peak.reserved else 0.0


def replay(snapshot: Snapshot, device: DeviceMemory) -> Replay:
    """Replay one device of a snapshot."""
    base, num_frees, unmatched = _baseline(device)
    made = {event.address for event in device.events if event.action == "alloc"}
    for block in device.blocks:
        if block.is_active and block.address not in made:
            base[block.address] = (block.requested_bytes, block.source)
    history = _History(device, base)
    live = history.live_until(history.peak_event)
    sizes, counts = Counter[int](), Counter[int]()
    for size, source in live.values():
        sizes[source] += size
        counts[source] += 1
    first = device.events[0].microsecond if device.events else 0
    at = device.events[history.peak_event].microsecond if history.peak_event >= 0 else first
    at_end = {block.address for block in device.blocks if block.is_active}
    lost = sum(address not in at_end for address in history.live_until(len(device.events) - 1))
    return Replay(
        device=device.number,
        baseline=history.levels[0],
        peak=history.levels[history.peak_event + 1],
        peak_event=history.peak_event,
        peak_second=(at - first) / 1e6 if device.events else None,
        end=history.levels[-1],
        live={source: (size, counts[source]) for source, size in sizes.most_common()},
        unsourced_baseline_bytes=sum(size for size, source in base.values() if not source),
        num_events=len(device.events),
        num_frees=num_frees,
        num_unmatched_frees=unmatched,
        num_lost=lost,
        steps=_steps(snapshot, device, history),
        points=history.points(),
        oom=next((event for event in reversed(device.events) if event.action == "oom"), None),
    )


def _baseline(device: DeviceMemory) -> tuple[dict[int, tuple[int, int]], int, int]:
    """Blocks that are freed without an event that made them; and how many frees there are, and how many such."""
    base, made, num_frees = dict[int, tuple[int, int]](), set[int](), 0
    for event in device.events:
        if event.action == "alloc":
            made.add(event.address)
        elif event.action == "free_requested":
            num_frees += 1
            if event.address not in made and event.address not in base:
                base[event.address] = (event.num_bytes, 0)
            made.discard(event.address)
    return base, num_frees, len(base)


class _History:
    """Levels after every event; the first one is the baseline."""

    def __init__(self, device: DeviceMemory, base: dict[int, tuple[int, int]]) -> None:
        self.device, self.base = device, base
        grown = sum(event.num_bytes for event in device.events if event.action in _GROWS)
        shrunk = sum(event.num_bytes for event in device.events if event.action in _SHRINKS)
        held = sum(size for size, _ in base.values())
        self.levels = [Level(held, held, max(0, device.reserved_bytes - grown + shrunk))]
        self.peak_event, highest = -1, held
        for number, event in enumerate(device.events):
            level = _after(self.levels[-1], event)
            self.levels.append(level)
            if level.allocated > highest:
                self.peak_event, highest = number, level.allocated

    def live_until(self, last: int) -> dict[int, tuple[int, int]]:
        """The blocks that are allocated after an event, by address: bytes and source."""
        live = dict(self.base)
        for event in self.device.events[: last + 1]:
            if event.action == "alloc":
                live[event.address] = (event.num_bytes, event.source)
            elif event.action == "free_requested":
                live.pop(event.address, None)
        return live

    def points(self) -> list[tuple[int, int, int]]:
        events = self.device.events
        every = -(-len(events) // MOST_POINTS) or 1
        found = []
        for first in range(0, len(events), every):
            part = self.levels[first + 1 : first + every + 1]
            highest = max(part, key=lambda level: level.allocated)
            found.append((events[first].microsecond, highest.allocated, max(level.reserved for level in part)))
        return found


def _after(level: Level, event: Event) -> Level:
    allocated, active, reserved = level.allocated, level.active, level.reserved
    if event.action == "alloc":
        allocated, active = allocated + event.num_bytes, active + event.num_bytes
    elif event.action == "free_requested":
        allocated = max(0, allocated - event.num_bytes)
    elif event.action == "free_completed":
        active = max(0, active - event.num_bytes)
    elif event.action in _GROWS:
        reserved += event.num_bytes
    elif event.action in _SHRINKS:
        reserved = max(0, reserved - event.num_bytes)
    return Level(allocated, active, reserved)


def _steps(snapshot: Snapshot, device: DeviceMemory, history: _History) -> list[StepPeak]:
    found, base = [], history.levels[0].allocated
    for name, start, end in snapshot.steps[:1000]:
        inside = [number for number, event in enumerate(device.events) if start <= event.microsecond < end]
        if inside:
            before = history.levels[inside[0]].allocated
            highest = max(history.levels[number + 1].allocated for number in inside)
            found.append(StepPeak(name, before - base, max(0, highest - before)))
    return found
