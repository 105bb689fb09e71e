"""The steps and ranks of a profile: capture quality, step budget, ranks, opportunities by time, status of claims."""

from collections.abc import Iterator

from threefold.profile.ranks.fingerprints import own_seconds
from threefold.profile.ranks.job import JobTrace
from threefold.profile.steps.budget import NAMES
from threefold.report.terminal import table
from threefold.units import format_many

_MOST_RANKS, _MOST_COLLECTIVES, _MOST_LIMITS = 8, 6, 8
_ALWAYS = ("step", "busy", "idle", "compute_busy", "communication_busy", "exposed", "compute_absent")
_LABELS = {
    "non_communication_busy": "busy without communication",
    "compute_busy": "compute",
    "communication_busy": "communication",
    "exposed": "  exposed (at most)",
    "compute_absent": "without compute",
    "busy_without_compute": "  busy with something else",
    "launch_starved": "  launch-starved",
    "starved_in_sync": "    host waits for device",
    "blocking": "  blocking",
    "dependency_stalled": "  dependency-stalled",
    "unresolved": "  unresolved",
    "residual": "  residual",
}
_IN_ORDER = ("trace-verified", "source-verified", "inferred", "unverified")


def job_text(job: JobTrace) -> str:
    parts = [_capture(job), _budget(job), _ranks(job), _collectives(job), _opportunities(job), _claims(job)]
    return "\n\n".join(part for part in parts if part)


def _capture(job: JobTrace) -> str:
    steps = job.slowest.steps
    counted = format_many(len(steps.budgets), "step")
    lines = [f"capture: {counted} by {steps.windows.source}, of {format_many(len(job.ranks), 'rank')}"]
    lines += [f"  {window.name} is left out: {why}" for window, why in steps.windows.dropped[:3]]
    slowdown = job.perturbation.slowdown
    if slowdown is not None:
        lines.append(f"  steps under the profiler take {slowdown:+.1%} against those after it")
    else:
        lines.append("  no step without the profiler is known, so its own cost is not (--unprofiled SECONDS)")
    if job.residual is not None:
        lines.append(f"  clocks are joined by collectives; {job.residual * 1e3:.3g} ms are left between ranks")
    warnings = job.warnings()
    lines += [f"  {one}" for one in warnings[:_MOST_LIMITS]]
    more = len(warnings) - _MOST_LIMITS
    return "\n".join([*lines, *([f"  and {more} more (--json has all)"] if more > 0 else [])])


def _budget(job: JobTrace) -> str:
    steps = job.slowest.steps
    whole = steps.spread("step").median or 1.0
    rows = []
    for name in NAMES:
        spread = steps.spread(name)
        if name in _ALWAYS or abs(spread.most) > 0.0005 * whole:
            values = (spread.median, spread.least, spread.most)
            rows.append([_LABELS.get(name, name), *(_ms(value) for value in values), f"{spread.median / whole:.0%}"])
    count = format_many(len(steps.budgets), "step")
    return f"a step of {job.slowest.name}, ms over {count}\n" + table(["part", "median", "min", "max", "share"], rows)


def _ranks(job: JobTrace) -> str:
    if len(job.ranks) < 2 and not job.missing:
        return ""
    rows = []
    for number in [*job.order, *(one for one in range(len(job.ranks)) if one not in job.order)][:_MOST_RANKS]:
        rank, clock = job.ranks[number], job.clocks[number]
        spreads = [rank.steps.spread(name).median for name in ("step", "compute_busy", "exposed", "idle")]
        skew = "-" if clock.skew is None else f"{clock.skew * 1e3:.3g}"
        mark = "yes" if number in job.order else ""
        rows.append([rank.name, mark, _ms(own_seconds(rank)), *(_ms(value) for value in spreads), skew])
    header = ["rank", "look at", "own, ms", "step", "compute", "exposed", "idle", "clock, ms"]
    more = len(job.ranks) - len(rows)
    lines = ["ranks, the slowest by its own time first", table(header, rows)]
    lines += [f"and {more} more (--json has all)"] * (more > 0)
    lines += [f"missing: {one}" for one in job.missing[:3]]
    return "\n".join(lines)


def _collectives(job: JobTrace) -> str:
    rows = []
    for one in job.jitter[:_MOST_COLLECTIVES]:
        waits = list(one.wait_seconds.values())
        members = f"{one.num_members}" + (f" of {len(one.ranks)}" if one.ranks else "")
        late = one.late_rank or "-"
        label = f"{one.kind} {one.axis}"
        wait = f"{_ms(min(waits))} to {_ms(max(waits))}"
        rows.append([label, members, str(one.num_matched), _ms(one.transfer_seconds), wait, late])
    if not rows:
        return ""
    header = ["collective", "ranks", "matched", "transfer, ms a step", "waiting for others", "late"]
    return "collectives that the ranks share: the shortest participant is the transfer, the rest is waiting\n" + table(
        header, rows
    )


def _opportunities(job: JobTrace) -> str:
    if not job.opportunities:
        return ""
    rows = [
        [one.name, _ms(one.seconds), f"{one.ceiling:+.1%}", one.status, one.look_at] for one in job.opportunities[:6]
    ]
    head = "at most to gain, each by itself (no forecast)"
    if len(job.opportunities) > 1:
        head += f"; they do not overlap, and all together end at {job.joint_ceiling:+.1%}"
    return f"{head}\n" + table(["time", "ms a step", "throughput", "status", "look at"], rows)


def _claims(job: JobTrace) -> str:
    return "\n".join(["how sure each claim is", *_claim_lines(job)])


def _claim_lines(job: JobTrace) -> Iterator[str]:
    claims = job.claims()
    for status in _IN_ORDER:
        said = [one.text for one in claims if one.status == status]
        if said:
            yield f"  {status}: {'; '.join(said)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
