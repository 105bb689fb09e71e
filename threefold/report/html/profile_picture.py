"""What traces of a run measured: where the time of each device went, and which wall that makes."""

from threefold.profile.analyze import Profile
from threefold.profile.measure import DeviceWalls
from threefold.report.html.markup import Markup, tag
from threefold.report.html.svg import (
    WIDTH,
    drawing,
    figure,
    legend,
    mark,
    nice_ticks,
    numbers_table,
    rect,
    text,
    x_axis,
)
from threefold.units import format_number

MOST_DEVICES = 32
_LEFT, _RIGHT = 170.0, 30.0
_CLASSES = {
    "compute": "hue-blue",
    "exposed communication": "hue-red",
    "unknown": "hue-pink",
    "copies alone": "hue-green",
    "idle": "hue-gray light",
}


def profile_figure(found: Profile) -> Markup:
    """One bar a device, longest first, in parts that add up to its span."""
    devices = sorted(found.devices, key=lambda device: -device.span_seconds)
    shown = devices[:MOST_DEVICES]
    most = 1.02 * (shown[0].span_seconds or 1.0)
    bottom = 8 + 24.0 * len(shown)

    def x_of(seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * seconds / most

    parts = [x_axis(x_of, nice_ticks(0, most), 4, bottom, "seconds of the trace")]
    for number, device in enumerate(shown):
        y, done = 6 + 24.0 * number, 0.0
        parts.append(text(_LEFT - 10, y + 15, device.name, "label", "end"))
        for name, seconds in time_by_part(device).items():
            if seconds > 0:
                says = f"{device.name}, {name}: {format_number(seconds)} s, {device.share(seconds):.1%}"
                width = max(0.4, x_of(done + seconds) - x_of(done) - 0.6)
                parts.append(mark(rect(x_of(done), y + 2, width, 18, _CLASSES[name]), says))
                done += seconds
    wall = found.diagnosis
    rows = [[device.name, *(format_number(seconds) for seconds in time_by_part(device).values())] for device in devices]
    evidence = [tag("li", f"{name}: {said}") for name, every in wall.evidence.items() for said in every]
    left_out = f" The longest {MOST_DEVICES} of {len(devices)} are drawn." if len(devices) > MOST_DEVICES else ""
    return figure(
        f"Traces: the wall is {wall.dominant}",
        f"Measured, with a confidence of {wall.confidence:.0%}.{left_out}",
        drawing(
            bottom + 60,
            f"time of {len(shown)} devices by kind",
            *parts,
            legend([(class_, name) for name, class_ in _CLASSES.items()], _LEFT, bottom + 54),
        ),
        tag("ul", *evidence),
        numbers=numbers_table(["device", *_CLASSES], rows),
    )


def time_by_part(device: DeviceWalls) -> dict[str, float]:
    """Parts of the span that add up to it. What runs beside compute or exposed communication is in those."""
    compute, exposed = device.compute_seconds, device.communication.exposed_seconds
    rest = max(0.0, device.busy_seconds - compute - exposed)
    unknown = min(rest, device.unknown_seconds)
    return {
        "compute": compute,
        "exposed communication": exposed,
        "unknown": unknown,
        "copies alone": rest - unknown,
        "idle": device.host.idle_seconds,
    }
