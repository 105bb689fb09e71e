"""Two traces compared by what `threefold profile` measured of them: where the device's seconds went, and what changed.

The seconds of a span are compute (the union of compute kernels), communication that nothing hid, time without any work
on the device, and the rest (copies, unknown kernels): these add up to the span, and their changes to its change.
Seconds are those of a step where both traces say how many steps they hold, else of the whole span.
Profiles may come from a stranger's file: anything in them that is no finite number counts as absent.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from threefold.compare.sides import Profile, TermRow
from threefold.findings import Finding, FindingsError

MOST_DETAILS = 40
LEAST_SHARE = 0.001  # of the span, below which a detail is left out
UNEQUAL_COUNTS = 0.01  # of the device events in a step, from which two traces did not run the same kernels


@dataclass(frozen=True, slots=True)
class Traced:
    """Seconds of both traces."""

    per: Literal["step", "span"]
    num_steps: tuple[int | None, int | None]
    span: TermRow
    parts: list[TermRow]  # what the span consists of
    details: list[TermRow]  # inside of the parts: kinds of kernels, axes of communication, regions of the model

    def to_json(self) -> dict[str, Any]:
        return {
            "per": self.per,
            "num_steps": list(self.num_steps),
            "span": self.span.to_json(),
            "parts": [row.to_json() for row in self.parts],
            "details": [row.to_json() for row in self.details],
        }


def compare_traces(a: Profile, b: Profile) -> Traced:
    """Compare two profiles. Raises a finding where one has no span."""
    for letter, profile in (("A", a), ("B", b)):
        if not (_number(profile.get("span_seconds")) or 0) > 0:
            problem = f"the profile of {letter} has no span_seconds"
            advice = "make it anew with `threefold profile --json`"
            raise FindingsError([Finding(rule="enough-steps", at="span_seconds", problem=problem, advice=advice)])
    steps = _steps(a), _steps(b)
    counts = [float(count) for count in steps if count] if all(steps) else [1.0, 1.0]
    seconds = [_Seconds(profile, 1 / count) for profile, count in zip((a, b), counts, strict=True)]
    parts = [TermRow(name, wall, *(each.parts()[name] for each in seconds)) for name, wall in _PARTS.items()]
    known = [dict(each.details()) for each in seconds]
    names = list(dict.fromkeys([*known[0], *known[1]]))
    rows = [TermRow(name, name.partition(" ")[0], known[0].get(name, 0.0), known[1].get(name, 0.0)) for name in names]
    least = LEAST_SHARE * max(each.span for each in seconds)
    kept = sorted((row for row in rows if max(row.a, row.b) > least), key=lambda row: -abs(row.b - row.a))
    span = TermRow("span", "", seconds[0].span, seconds[1].span)
    return Traced("step" if all(steps) else "span", steps, span, parts, kept[:MOST_DETAILS])


def trace_remarks(a: Profile, b: Profile) -> Iterator[Finding]:
    """What to know before two traces are taken for an A/B of overlap."""
    traced = compare_traces(a, b)
    counts = [_events(profile) for profile in (a, b)]
    if all(traced.num_steps) and all(counts):
        per_step = [count / (steps or 1) for count, steps in zip(counts, traced.num_steps, strict=True)]
        if abs(per_step[1] / per_step[0] - 1) > UNEQUAL_COUNTS:
            yield Finding(
                rule="work-is-comparable",
                severity="note",
                at="num_events",
                problem=f"{per_step[0]:.0f} and {per_step[1]:.0f} device events a step: the same kernels did not run",
                advice="an A/B of overlap has equal counts on the same rank and step; other changes may have others",
            )
    sums = [sum(seconds for name, seconds in pairs if name.startswith("compute kind ")) for pairs in _details(a, b)]
    if sums[0] and sums[1] > sums[0] and traced.span.b < traced.span.a:
        yield Finding(
            rule="work-is-comparable",
            severity="note",
            at="span_seconds",
            problem=f"compute kernels take {sums[1] / sums[0] - 1:.1%} longer in sum, and the {traced.per} is shorter: "
            "they share the GPU with what runs next to them",
            advice="judge by unprofiled steps and by exposed seconds, not by sums of kernels",
        )


def _events(profile: Profile) -> float:
    return next((_number(device.get("num_events")) or 0.0 for device in _longest(profile)), 0.0)


def _details(a: Profile, b: Profile) -> list[list[tuple[str, float]]]:
    """The rows of both sides, per step where both know their steps."""
    steps = _steps(a), _steps(b)
    counts = [count or 1 for count in steps] if all(steps) else [1, 1]
    return [list(_Seconds(profile, 1 / count).details()) for profile, count in zip((a, b), counts, strict=True)]


# The parts of a span, and the wall that each belongs to.
_PARTS = {
    "compute": "compute",
    "exposed communication": "communication",
    "idle": "host",
    "copies and unknown kernels": "unknown",
}


class _Seconds:
    """The seconds of one profile, multiplied by a scale."""

    def __init__(self, profile: Profile, scale: float) -> None:
        walls = profile.get("walls")
        self.walls: Mapping[str, Any] = walls if isinstance(walls, Mapping) else {}
        self.scale = scale
        self.span = (_number(profile.get("span_seconds")) or 0.0) * scale

    def parts(self) -> dict[str, float]:
        compute = self._at("compute", "total_seconds")
        exposed = self._at("communication", "exposed_seconds")
        idle = self._at("host", "idle_seconds")
        return dict(zip(_PARTS, (compute, exposed, idle, self.span - compute - exposed - idle), strict=True))

    def details(self) -> Iterator[tuple[str, float]]:
        for wall, table, key in _DETAILS:
            entries = self._table(wall).get(table)
            for name, value in entries.items() if isinstance(entries, Mapping) else ():
                found = _number(value.get(key) if key and isinstance(value, Mapping) else value)
                if found is not None:
                    yield f"{wall} {table.removeprefix('by_')} {str(name)[:60]}", found * self.scale

    def _table(self, wall: str) -> Mapping[str, Any]:
        table = self.walls.get(wall)
        return table if isinstance(table, Mapping) else {}

    def _at(self, wall: str, name: str) -> float:
        return (_number(self._table(wall).get(name)) or 0.0) * self.scale


# Tables inside of a wall, and the key of the seconds where an entry is a table of its own.
_DETAILS = (
    ("communication", "by_axis", "exposed_seconds"),
    ("compute", "by_kind", ""),
    ("compute", "by_region", ""),
    ("unknown", "names", ""),
)


def _steps(profile: Profile) -> int | None:
    """The steps inside the device with the longest span."""
    for device in _longest(profile):
        count = _number(device.get("num_steps"))
        return int(count) if count and count >= 1 else None
    return None


def _longest(profile: Profile) -> Iterator[Mapping[str, Any]]:
    """The device with the longest span, which the top level of a profile is about."""
    devices = profile.get("devices")
    for device in devices if isinstance(devices, list) else ():
        if isinstance(device, Mapping) and device.get("span_seconds") == profile.get("span_seconds"):
            yield device


def _number(value: Any) -> float | None:
    """A finite number, None for anything else."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number else None
    except OverflowError:
        return None
