"""The text of `threefold profile`: the wall with its evidence, where the time went, and what could help."""

from collections.abc import Iterator

from threefold.profile.analyze import Profile
from threefold.profile.measure import DeviceWalls
from threefold.profile.ranks.fingerprints import own_seconds
from threefold.profile.ranks.job import JobTrace
from threefold.profile.steps.budget import NAMES
from threefold.report.terminal import advice_text, table
from threefold.units import format_many

MAX_DEVICES = 16
MOST_NAME = 56  # characters of a kernel's name
MIN_LINK_SHARE = 0.01  # of the time, below which copies between host and device are not shown


def profile_text(found: Profile) -> str:
    top = found.top
    parts = [_headline(found), _evidence(found), job_text(found.job), _parts(found), _devices(found), _axes(top)]
    parts.append(_links(top))
    return "\n\n".join(part for part in [*parts, _regions(top), _longest(found), _advice(found)] if part)


def _headline(found: Profile) -> str:
    top, wall = found.top, found.diagnosis.dominant
    steps = f", {format_many(top.num_steps, 'step')} of {top.step_seconds:.4g} s" if top.step_seconds else ""
    name = f" ({top.device.name})" if top.device.name else ""
    wall_text = "no wall can be told: most of the time is unknown" if wall == "unknown" else f"the wall is {wall}"
    return (
        f"measured: {top.name}{name}, {top.num_events:,} device events over {top.span_seconds:.4g} s{steps}"
        f"\n{wall_text} (confidence {found.diagnosis.confidence:.0%})"
    )


def _evidence(found: Profile) -> str:
    """Sentences of the dominant wall first, then of the others that have something to say."""
    said = found.diagnosis.evidence
    order = [found.diagnosis.dominant, *(wall for wall in said if wall != found.diagnosis.dominant)]
    return "\n".join(f"  {wall + ':':<15} {text}" for wall in order for text in said[wall])


def _parts(found: Profile) -> str:
    """Encoder, projector and decoder of a vision-language model, forward and backward, as the run measured them."""
    step, seconds = found.log.step_seconds, found.log.part_seconds
    if not seconds or not step:
        return ""
    named = {**seconds, "elsewhere": max(0.0, step - sum(seconds.values()))}
    rows = [[name, _seconds(value), f"{value / step:.0%}"] for name, value in named.items()]
    return f"parts of a step of {step:.4g} s (metrics.jsonl, forward and backward)\n" + table(
        ["part", "seconds", "share"], rows
    )


def _devices(found: Profile) -> str:
    shown = sorted(found.devices, key=lambda device: -device.span_seconds)[:MAX_DEVICES]
    rows = [_device_row(device) for device in shown]
    header = ["device", "span, s", "compute", "comm.", "exposed", "hidden", "idle", "host-bound", "unknown"]
    rest = len(found.devices) - len(shown)
    more = f"\nand {format_many(rest, 'device')} with shorter spans (--json has all)" if rest else ""
    return f"seconds on each device\n{table(header, rows)}{more}"


def _device_row(device: DeviceWalls) -> list[str]:
    hidden = device.communication.hidden_fraction
    seconds = (device.compute_seconds, device.communication.total_seconds, device.communication.exposed_seconds)
    bound = _seconds(device.host.host_bound_seconds) if device.host.has_launches else "-"
    return [
        device.name,
        f"{device.span_seconds:.4f}",
        *(_seconds(value) for value in seconds),
        "-" if hidden is None else f"{hidden:.0%}",
        _seconds(device.host.idle_seconds),
        bound,
        _seconds(device.unknown_seconds),
    ]


def _seconds(value: float) -> str:
    return f"{value:.4f}"


def _axes(top: DeviceWalls) -> str:
    if not top.by_axis:
        return ""
    rows = [
        [axis, _seconds(one.total_seconds), _seconds(one.exposed_seconds), f"{one.hidden_fraction or 0.0:.0%}"]
        for axis, one in top.by_axis.items()
    ]
    return f"communication of {top.name} by axis\n" + table(["axis", "total, s", "exposed, s", "hidden"], rows)


def _links(top: DeviceWalls) -> str:
    """Copies between host and device, where they take a percent of the time: offload does."""
    if max((top.share(one.total_seconds) for one in top.links.values()), default=0.0) < MIN_LINK_SHARE:
        return ""
    rows = [
        [
            name,
            f"{one.num_bytes / 1e9:.2f}",
            _seconds(one.total_seconds),
            _seconds(one.exposed_seconds),
            f"{one.bytes_per_second / 1e9:.1f}",
        ]
        for name, one in top.links.items()
    ]
    head = ["direction", "GB", "total, s", "exposed, s", "GB/s"]
    return f"copies of {top.name} between host and device\n" + table(head, rows)


def _regions(top: DeviceWalls) -> str:
    if not top.by_region:
        return ""
    rows = [
        [name, _seconds(seconds), f"{top.share(seconds):.0%}"] for name, seconds in list(top.by_region.items())[:12]
    ]
    return f"device time of {top.name} by annotated range\n" + table(["range", "seconds", "share"], rows)


def _longest(found: Profile) -> str:
    """The longest kernels by name and shape, with their share of the span."""
    if not found.longest:
        return ""
    rows = [
        [_cut(one.name), one.shape or "-", one.kind, f"{one.calls:,}", _seconds(one.seconds),
         f"{one.median_seconds * 1e6:.1f}", f"{found.top.share(one.seconds):.0%}"]
        for one in found.longest
    ]  # fmt: skip
    header = ["kernel", "operands", "kind", "calls", "seconds", "median, us", "share"]
    return f"longest kernels of {found.top.name}\n{table(header, rows)}"


def _cut(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 3]}..."


def _advice(found: Profile) -> str:
    source = "gains are estimated" if found.plan else "with --plan they are fields to set, with estimated gains"
    return f"{advice_text(found.advice)}\n({source})" if found.advice else ""


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
