"""What traces of a job's ranks say, in a few lines; `threefold profile` has the tables. `diagnosis.py` calls it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.diagnose.files import Kind
from threefold.diagnose.part import Context
from threefold.diagnose.redact import Redactor
from threefold.findings import Finding, FindingsError
from threefold.profile.analyze import Profile, profile_traces
from threefold.units import format_many

_MOST = 5


@dataclass
class TracePart:
    """All traces of a diagnosis together."""

    profile: Profile | None = None
    findings: list[Finding] = field(default_factory=list)
    redact: Redactor = field(default_factory=Redactor)

    @property
    def kind(self) -> Kind:
        return "trace"

    @property
    def lines(self) -> list[str]:
        return [self.redact(line) for line in _lines(self.profile)] if self.profile else []

    def to_json(self) -> dict[str, Any]:
        if self.profile is None:
            return {}
        said: dict[str, Any] = _redacted(self.profile.to_json(), self.redact)
        return said


def read_traces(paths: Sequence[Path], context: Context) -> TracePart:
    """Read all traces; those of several ranks are joined."""
    context.say(f"reading {format_many(len(paths), 'trace')}")
    try:
        return TracePart(profile_traces(paths, context.plan), redact=context.redact)
    except FindingsError as error:
        return TracePart(findings=list(error.findings), redact=context.redact)


def _lines(found: Profile) -> Iterator[str]:
    job, wall = found.job, found.diagnosis
    steps = job.slowest.steps
    yield f"the wall is {wall.dominant} (confidence {wall.confidence:.0%})"
    step = steps.spread("step")
    counted = f"{format_many(step.count, 'step')} by {steps.windows.source}"
    yield f"a step of {job.slowest.name}: {_ms(step.median)}, {_ms(step.least)} to {_ms(step.most)} over {counted}"
    names = ("compute_busy", "exposed", "launch_starved", "blocking", "dependency_stalled", "unresolved", "idle")
    parts = [(name.replace("_", " "), steps.spread(name).median) for name in names]
    yield "  of it " + ", ".join(f"{name} {_ms(seconds)}" for name, seconds in parts if seconds > 0)
    for one in [one for one in job.jitter if one.late_rank][:_MOST]:
        longest = max(one.wait_seconds.values())
        where = f"{one.kind} of {one.axis}, {one.num_matched} matched"
        yield f"{one.late_rank} is late in {where}: others wait up to {_ms(longest)} a step for it"
    for opportunity in job.opportunities[:_MOST]:
        gain = f"{opportunity.ceiling:+.1%} at most, {opportunity.status}"
        yield f"{opportunity.name}: {_ms(opportunity.seconds)} a step ({gain}); look at {opportunity.look_at}"
    yield from (f"missing: {one}" for one in job.missing[:3])
    yield from (f"limit: {one}" for one in job.warnings()[:3])
    yield "threefold profile FILE... has the tables"


def _redacted(value: Any, redact: Redactor) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_redacted(one, redact) for one in value]
    if isinstance(value, dict):
        return {name: _redacted(one, redact) for name, one in value.items()}
    return value


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
