"""The logs of one job: scanned file by file, and what they say together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.diagnose.deaths.verdict import Verdict, judge
from threefold.diagnose.files import Kind
from threefold.diagnose.logs.configuration import Configuration, read_configuration
from threefold.diagnose.logs.health import Column, Health, health_warnings, judge_columns, last_start
from threefold.diagnose.logs.printed import Printed
from threefold.diagnose.logs.scan import Scan
from threefold.diagnose.logs.speed import Speed, beyond_plan, measured_speed
from threefold.diagnose.logs.steps import Steps
from threefold.diagnose.part import Context, unreadable
from threefold.diagnose.redact import Redactor
from threefold.findings import Finding, as_overrides
from threefold.launch.hang_diagnosis import format_ranks
from threefold.plan.plan import Plan
from threefold.remedies.advise import Advice
from threefold.remedies.evidence import Evidence
from threefold.rules.fixes import advice
from threefold.units import format_bytes, format_many

_TAKES_MEMORY = ("selective-before-full",)  # rules whose fix takes memory
_SYSTEMS = {"megatron": "Megatron", "torchtitan": "torchtitan", "threefold": "threefold"}


@dataclass
class JobLogs:
    """What the logs of a job say."""

    kind: Kind = "log"
    verdict: Verdict = field(default_factory=lambda: Verdict("no death seen"))
    health: Health = field(default_factory=Health)
    speed: Speed = field(default_factory=Speed)
    configuration: Configuration = field(default_factory=Configuration)
    remedies: Sequence[Advice] = ()  # for a plan that ran out of memory
    printed: Printed = field(default_factory=Printed)  # of the log that holds the configuration
    checkpoints: set[str] = field(default_factory=set)  # what any log says of them: "saved", "loaded"
    steps: Steps = field(default_factory=Steps)  # of the log with most steps
    notices: dict[str, str] = field(default_factory=dict)  # features that fell back, each with its line
    columns: dict[str, Column] = field(default_factory=dict)  # of the steps of the last start
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.facts,
            "verdict": self.verdict.to_json() | {"evidence": self.facts.get("evidence")},
            "steps": self.health.to_json(),
            "speed": {name: value for name, value in vars(self.speed).items() if name != "causes"},
            "causes": self.facts.get("causes", []),
            "remedies": [piece.to_json() for piece in self.remedies],
            "plan": dict(self.configuration.plan.written) if self.configuration.plan else None,
            "lines": self.lines,
        }


def read_logs(paths: Sequence[Path], context: Context) -> JobLogs:
    found = JobLogs()
    scans = []
    for place, path in enumerate(paths):
        number = f"log {place + 1} of {len(paths)}: " if len(paths) > 1 else ""
        try:
            scans.append(Scan(path, _progress(context, number)).read())
        except (OSError, ValueError) as error:
            found.findings.append(unreadable(path, error))
    if not scans:
        return found
    steady = max(scans, key=lambda scan: scan.steps.num_read)
    printed = next((scan.printed for scan in scans if _has_configuration(scan.printed)), steady.printed)
    ranks = set[int]().union(*(scan.ranks for scan in scans))
    found.verdict = judge(scans)
    found.columns = last_start(steady.steps)
    found.health = judge_columns(found.columns)
    num_ranks = max(ranks) + 1 if ranks else 0
    found.configuration = read_configuration(printed, context, num_ranks, found.health)
    notices = {slug: one for scan in scans for slug, one in scan.notices.items()}
    found.printed, found.steps = printed, steady.steps
    found.checkpoints = set[str]().union(*(scan.printed.checkpoints for scan in scans))
    found.notices = {slug: first.text[:160] for slug, (_, first, _) in notices.items()}
    priced = found.configuration.plan if context.judges_plans else None
    found.remedies = _remedies(found.verdict, priced)
    found.speed = measured_speed(priced, found.health, steady.steps.system, notices)
    redact = context.redact
    found.facts = _facts(found, scans, steady, printed, ranks) | {
        "notices": {slug: count for slug, (_, _, count) in notices.items()},
        "causes": [redact(cause) for cause in found.speed.causes],
        "evidence": _evidence(found.verdict, redact),
    }
    found.lines = [redact(line) for line in _lines(found, scans, steady, printed, ranks, notices)]
    is_short = found.verdict.shortage is not None  # then no advice that takes memory
    found.findings += [f for f in found.configuration.findings if not (is_short and f.rule in _TAKES_MEMORY)]
    return found


def _remedies(verdict: Verdict, plan: Plan | None) -> list[Advice]:
    """What would make room for a plan whose job ran out of device memory, unless fragments alone were in its way."""
    short = verdict.shortage
    if plan is None or short is None or short.kind in ("fragmentation", "other process"):
        return []
    needed = max(short.capacity or 0.0, plan.chip.memory_bytes) + (short.requested or 1.0)
    return [piece for piece in advice(plan, Evidence(device_bytes=needed)) if piece.wall == "memory" and piece.changes]


def _progress(context: Context, head: str) -> Callable[[int], None]:
    return lambda done: context.say(f"{head}{format_bytes(done)} read")


def _facts(found: JobLogs, scans: Sequence[Scan], steady: Scan, printed: Printed, ranks: set[int]) -> dict[str, Any]:
    starts = [len(scan.steps.attempt_starts) + 1 for scan in scans] + [scan.printed.num_starts for scan in scans]
    return {
        "system": _system(steady, printed),
        "ranks": sorted(ranks)[:4096],
        "num_lines": sum(scan.num_lines for scan in scans),
        "starts": max(starts),
        "versions": printed.versions,
        "device": printed.device or None,
    }


def _system(steady: Scan, printed: Printed) -> str | None:
    if printed.arguments or printed.summary:
        return "Megatron Bridge" if printed.summary else "Megatron-LM"
    return _SYSTEMS.get(steady.steps.system or "")


def _evidence(verdict: Verdict, redact: Redactor) -> dict[str, Any] | None:
    seen = verdict.evidence
    return {"text": redact(seen.text), "rank": seen.rank, "file": seen.file, "line": seen.line} if seen else None


def _has_configuration(printed: Printed) -> bool:
    return bool(printed.arguments or printed.summary or printed.titan)


def _lines(
    found: JobLogs, scans: Sequence[Scan], steady: Scan, printed: Printed, ranks: set[int], notices: dict[str, Any]
) -> list[str]:
    lines = [_head(found, scans, steady, ranks)]
    if printed.versions or printed.device:
        known = [printed.device] if printed.device else []
        lines.append(", ".join(known + [f"{name} {version}" for name, version in sorted(printed.versions.items())]))
    plan = found.configuration.plan
    if plan:
        lines.append(
            f"plan, from {found.configuration.source}: {plan.model.name} on {plan.cluster.gpus} x {plan.cluster.chip}"
        )
    lines += _step_lines(found.health, steady)
    lines += _memory_lines(printed)
    lines += found.speed.lines()
    explained = {cause.partition(":")[0] for cause in found.speed.causes} if found.speed.is_slow else set()
    for slug, (_, first, count) in notices.items():
        if slug not in explained:
            lines.append(f"{slug} ({count} x): {first.text[:160]} ({first.file}:{first.line})")
    short = found.verdict.shortage
    more = beyond_plan(plan, short.allocated) if plan and short and short.kind == "shortage" else ""
    remedies = [f"  remedy   {piece}" for piece in found.remedies]
    return [*lines, *_death_lines(found.verdict, steady), *([f"  {more}"] if more else []), *remedies]


def _head(found: JobLogs, scans: Sequence[Scan], steady: Scan, ranks: set[int]) -> str:
    system = found.facts["system"] or ""
    parts = [format_many(len(scans), "log"), format_many(sum(scan.num_lines for scan in scans), "line")]
    if ranks:
        parts.append(format_ranks(sorted(ranks)))
    if found.facts["starts"] > 1:
        parts.append(f"{found.facts['starts']} starts, of which the last counts")
    if any(scan.is_cut for scan in scans):
        parts.append("a packed file is cut off")
    return (f"{system}: " if system else "") + ", ".join(parts)


def _step_lines(health: Health, steady: Scan) -> list[str]:
    if health.last is None:
        return ["no step was reported"]
    of = f" of {steady.steps.total}" if steady.steps.total else ""
    text = f"steps {health.first} to {health.last}{of}"
    if health.step_seconds is not None:
        text += f": {health.step_seconds:.3g} s a step"
        text += f" ({health.spread[0]:.3g} to {health.spread[1]:.3g})" if health.spread else ""
    elif health.tokens_per_second:
        text += f": {health.tokens_per_second:,.0f} tokens/s"
    if health.tflops:
        text += f", {health.tflops:.4g} TFLOP/s a GPU"
    if health.first_loss is not None and health.last_loss is not None:
        text += f", loss {health.first_loss:.4g} to {health.last_loss:.4g}"
    if steady.steps.stride > 1:
        text += f"; one step line in {steady.steps.stride} is in these numbers"
    return [text, *(f"  {warning}" for warning in health_warnings(health, steady.steps))]


def _memory_lines(printed: Printed) -> list[str]:
    peaks = {}
    for rank, values in printed.memory_bytes.items():
        peak = max((size for name, size in values.items() if "max" in name or "peak" in name), default=0.0)
        if peak:
            peaks[rank] = peak
    if not peaks:
        return []
    most, least = max(peaks, key=lambda rank: peaks[rank]), min(peaks, key=lambda rank: peaks[rank])
    text = f"memory: peak {format_bytes(peaks[most])} on rank {most}"
    return [text + (f", {format_bytes(peaks[least])} on rank {least}" if len(peaks) > 1 else "")]


def _death_lines(verdict: Verdict, steady: Scan) -> list[str]:
    if verdict.status != "died" or verdict.evidence is None:
        if verdict.status == "finished":
            return ["the job came to its end"]
        steps = steady.steps
        if steps.last >= 0 and steps.total and steps.last < steps.total:
            text = f"the log ends at step {steps.last} of {steps.total} without an error: "
            return [text + "it goes on, hangs, or was killed (SIGKILL leaves no word): ask the scheduler"]
        return ["no death in it"]
    seen = verdict.evidence
    rank = f" on rank {seen.rank}" if seen.rank is not None else ""
    after = f" after step {steady.steps.last}" if steady.steps.last >= 0 else " before the first step"
    where = f"{seen.file}:{seen.line}"
    if verdict.death is None:
        lines = [f"died of something unknown{rank}{after}; its first error, {where}:", f"  {seen.text[:400]}"]
        lines += [f"    {frame}" for frame in seen.frames[-4:]]
    else:
        death = verdict.death
        lines = [
            f"died of {death.slug} ({verdict.confidence} confidence){rank}{after}",
            f"  {where}: {seen.text[:400]}",
        ]
        lines += [f"  {verdict.shortage.text()}"] if verdict.shortage and verdict.shortage.text() else []
        lines += [f"  cause    {death.cause}", f"  confirm  {death.confirm}", f"  fix      {death.fix}"]
        if death.fields:
            lines.append(f"  plan     {as_overrides(death.fields)}")
        lines.append(f"  source   {death.source}")
    if verdict.first_error:
        first = verdict.first_error
        rank = f" of rank {first.rank}" if first.rank is not None else ""
        lines.append(f"  before it, an error{rank} ({first.file}:{first.line}): {first.text[:240]}")
    if verdict.also:
        others = [f"{slug}{_on(ranks)}" for slug, ranks in list(verdict.also.items())[:6]]
        lines.append(f"  also seen: {'; '.join(others)}")
    return lines


def _on(ranks: set[int | None]) -> str:
    known = sorted(rank for rank in ranks if rank is not None)
    return f" ({format_ranks(known)})" if known else ""
