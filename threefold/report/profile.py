"""The text of `threefold profile`: the wall with its evidence, where the time went, and what could help."""

from threefold.profile.analyse import Profile
from threefold.profile.measure import DeviceWalls
from threefold.report.profile_job import job_text
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
