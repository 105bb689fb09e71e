"""What memory snapshots say: the moment of the peak, what was live, fragments, and what one run has that another has
not. `diagnosis.py` calls `read_snapshots` for all snapshots that it is given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from threefold.diagnose.files import Kind
from threefold.diagnose.part import Context, unreadable
from threefold.diagnose.redact import Redactor
from threefold.diagnose.snapshots.replay import Replay, replay
from threefold.diagnose.snapshots.snapshot_file import Snapshot, read_snapshot
from threefold.findings import Finding
from threefold.units import GIB, format_bytes

RING = 100_000  # entries that Megatron keeps, always
MANY_FRAGMENTS = 0.15  # of the reserved bytes, from which fragments are worth a remedy
_MOST_LINES, _MOST_STEPS = 8, 4


@dataclass(slots=True)
class DeviceSnapshot:
    """One device of one file."""

    snapshot: Snapshot
    replay: Replay
    largest_free_bytes: int  # block at the end
    free_bytes: int

    @property
    def name(self) -> str:
        rank = "" if self.snapshot.rank is None else f", rank {self.snapshot.rank} by its name"
        return f"{self.snapshot.path.name} device {self.replay.device}{rank}"

    def live_lines(self) -> dict[str, int]:
        """Bytes at the peak by source line, largest first."""
        return _added((self.snapshot.sources.lines[source], size) for source, (size, _) in self.replay.live.items())

    def live_terms(self) -> dict[str, int]:
        """Bytes at the peak by the plan's terms; empty where no line is of the engine."""
        terms = _added(
            (self.snapshot.sources.terms[source] or "other", size) for source, (size, _) in self.replay.live.items()
        )
        return terms if set(terms) - {"other"} else {}


@dataclass
class SnapshotPart:
    """All snapshots of a diagnosis."""

    devices: list[DeviceSnapshot] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    redact: Redactor = field(default_factory=Redactor)

    @property
    def kind(self) -> Kind:
        return "snapshot"

    @property
    def lines(self) -> list[str]:
        said = [line for one in self.devices[:8] for line in _lines(one, brief=len(self.devices) > 1)]
        said += _difference_lines(*self.devices) if len(self.devices) == 2 else []
        return [self.redact(line) for line in said]

    def difference(self) -> dict[str, int]:
        """What B has at its peak beyond A, by source line; negative where A has more. Empty unless there are two."""
        if len(self.devices) != 2:
            return {}
        one, other = (device.live_lines() for device in self.devices)
        found = {line: other.get(line, 0) - one.get(line, 0) for line in {**one, **other}}
        return dict(sorted(((line, size) for line, size in found.items() if size), key=lambda item: -abs(item[1])))

    def to_json(self) -> dict[str, Any]:
        difference = {self.redact(line): size for line, size in self.difference().items()}
        return {"devices": [self._json(one) for one in self.devices], "difference": difference}

    def _json(self, one: DeviceSnapshot) -> dict[str, Any]:
        found = one.replay
        return {
            "file": self.redact(one.snapshot.path.name),
            "rank": one.snapshot.rank,
            "device": found.device,
            "baseline": asdict(found.baseline),
            "peak": asdict(found.peak),
            "end": asdict(found.end),
            "peak_second": found.peak_second,
            "fragments": found.fragments,
            "largest_free_bytes": one.largest_free_bytes,
            "free_bytes": one.free_bytes,
            "lines": {self.redact(line): size for line, size in one.live_lines().items()},
            "terms": one.live_terms(),
            "steps": [asdict(step) for step in found.steps],
            "num_events": found.num_events,
            "num_unmatched_frees": found.num_unmatched_frees,
            "limits": [self.redact(line) for line in _limits(one)],
            "points": found.points,
        }


def read_snapshots(paths: Sequence[Path], context: Context) -> SnapshotPart:
    """Read and replay every file. One that cannot be read becomes a finding."""
    part = SnapshotPart(redact=context.redact)
    for path in paths:
        context.say(f"reading {context.redact(path.name)}")
        try:
            snapshot = read_snapshot(path)
        except (OSError, ValueError) as error:
            part.findings.append(unreadable(path, error))
            continue
        for device in snapshot.devices:
            free = [block.num_bytes for block in device.blocks if not block.is_active]
            part.devices.append(DeviceSnapshot(snapshot, replay(snapshot, device), max(free, default=0), sum(free)))
        if not snapshot.devices:
            part.findings.append(unreadable(path, ValueError("it has neither segments nor events")))
    part.findings += [found for one in part.devices for found in _findings(one)]
    if len(part.devices) == 2 and len({one.snapshot.rank for one in part.devices}) == 2:
        said = "the two snapshots are of different ranks, which hold different things"
        part.findings.append(Finding(rule="snapshots-of-equal-ranks", severity="note", at="FILE", problem=said,
                                     advice="compare the files of equal ranks"))  # fmt: skip
    return part


def _lines(one: DeviceSnapshot, brief: bool) -> Iterator[str]:
    found = one.replay
    at = "before the first event"
    if found.peak_event >= 0:
        at = (
            f"at event {found.peak_event + 1:,} of {found.num_events:,}, {found.peak_second or 0:.2f} s after the first"
        )
    yield f"{one.name}: peak {_gib(found.peak.allocated)} allocated {at}"
    reserved = f"{_gib(found.peak.reserved)} reserved, of which {found.fragments:.0%} are fragments"
    yield f"  then {_gib(found.peak.active)} active and {reserved}"
    yield f"  before the recording {_gib(found.baseline.allocated)}, at its end {_gib(found.end.allocated)}"
    if found.oom is not None:
        asked, free = format_bytes(found.oom.num_bytes), format_bytes(found.oom.free_bytes)
        yield f"  it ended in an OOM: {asked} asked, {free} free on the device"
    total, most = found.peak.allocated or 1, 4 if brief else _MOST_LINES
    lines = one.live_lines()
    for line, size in list(lines.items())[:most]:
        yield f"  {format_bytes(size):>11} {size / total:>4.0%}  {line}"
    if len(lines) > most:
        yield f"  and {len(lines) - most} more lines (--json has all)"
    if terms := one.live_terms():
        yield "  by term: " + ", ".join(f"{term} {format_bytes(size)}" for term, size in list(terms.items())[:8])
    for step in found.steps[:_MOST_STEPS]:
        parts = (found.baseline.allocated, step.before_bytes, step.added_bytes)
        yield f"  {step.name}: {_gib(sum(parts))} = baseline, {_gib(parts[1])} before it, {_gib(parts[2])} in it"
    yield from (f"  limit: {line}" for line in _limits(one))


def _limits(one: DeviceSnapshot) -> Iterator[str]:
    """What the recording cannot say."""
    found = one.replay
    if not found.num_events:
        yield "no history was recorded: this is the state at the end, and not the peak"
        return
    if found.num_events >= RING and found.num_events % RING == 0:
        yield f"it holds the newest {found.num_events:,} entries, so that the start is lost"
    if found.num_unmatched_frees:
        share = found.num_unmatched_frees / max(1, found.num_frees)
        frees = f"{found.num_unmatched_frees:,} frees ({share:.0%})"
        yield f"{frees} have no allocation in the file: the recording began after them, and the baseline is derived"
    if found.unsourced_baseline_bytes:
        yield (
            f"{_gib(found.unsourced_baseline_bytes)} of the baseline have no source line: Megatron Bridge records the "
            "model since 9e9e58b9f (April 2026)"
        )
    if found.num_lost:
        yield f"{found.num_lost:,} blocks disappear without a free: entries are missing"
    if not found.steps:
        yield "steps are not marked: the profiler did not run with it, and the whole recording is replayed"


def _difference_lines(one: DeviceSnapshot, other: DeviceSnapshot) -> Iterator[str]:
    change = other.replay.peak.allocated - one.replay.peak.allocated
    yield f"B against A: the peak is {'+' if change >= 0 else '-'}{format_bytes(abs(change))}"
    first, second = one.live_lines(), other.live_lines()
    differences = [(second.get(line, 0) - first.get(line, 0), line) for line in {**first, **second}]
    shown = sorted((pair for pair in differences if pair[0]), key=lambda pair: -abs(pair[0]))
    for size, line in shown[:_MOST_LINES]:
        note = " (only B)" if line not in first else " (only A)" if line not in second else ""
        yield f"  {'+' if size > 0 else '-'}{format_bytes(abs(size))}  {line}{note}"
    if not shown:
        yield "  the same lines hold the same bytes"


def _findings(one: DeviceSnapshot) -> Iterator[Finding]:
    """Fragments that are worth a remedy, above all where an allocation failed beside enough free memory."""
    found, at = one.replay, one.snapshot.path.name
    if found.oom is not None and one.free_bytes >= found.oom.num_bytes > one.largest_free_bytes:
        problem = (
            f"{format_bytes(found.oom.num_bytes)} were not found although {format_bytes(one.free_bytes)} of the "
            f"reserved memory are free: the largest piece has {format_bytes(one.largest_free_bytes)}"
        )
        yield Finding(rule="oom-by-fragments", at=at, problem=problem, advice=_EXPANDABLE)
    elif found.fragments > MANY_FRAGMENTS and found.peak.reserved > GIB:
        problem = f"{found.fragments:.0%} of {_gib(found.peak.reserved)} reserved at the peak are fragments"
        yield Finding(rule="memory-in-fragments", severity="warning", at=at, problem=problem, advice=_EXPANDABLE)


_EXPANDABLE = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (not with NCCL user buffers)"


def _added(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, size in pairs:
        sums[name] = sums.get(name, 0) + size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
