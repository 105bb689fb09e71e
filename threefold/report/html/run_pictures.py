"""What a run logged: loss, speed, the health of its routers, and where the time of its traces went.

Long runs are drawn by ranges of steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from threefold.profile.analyze import Profile
from threefold.profile.expert_loads import LoadSummary, lost_text
from threefold.profile.measure import DeviceWalls
from threefold.profile.readers.run_record import RunRecord
from threefold.report.html.markup import Markup, html_table, join, tag
from threefold.report.html.svg import (
    WIDTH,
    drawing,
    figure,
    legend,
    mark,
    nice_ticks,
    numbers_table,
    polyline,
    rect,
    text,
    x_axis,
    y_axis,
)
from threefold.units import format_count, format_number

MOST_VALUE = 1e30  # what a curve can show
MOST_POINTS = 240  # of a curve; ranges of steps beyond that share a point
MOST_LAYERS, MOST_EXPERTS = 64, 128  # rows and columns of the table of loads; more experts share a column
_LEFT = 76.0
Column = NDArray[np.float64]
Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One column of a run, thinned: the mean of each range of steps between its least and greatest value."""

    steps: list[float]
    mean: list[float]
    least: list[float]
    most: list[float]


def thinned(steps: Column, values: Column, most_points: int = MOST_POINTS) -> Curve:
    """At most so many points. Steps without a value, or with one that nobody could draw, are left out."""
    known = np.abs(values) < MOST_VALUE
    steps, values = steps[known], values[known]
    edges = np.linspace(0, len(steps), min(len(steps), most_points) + 1).astype(int)
    ranges = [slice(first, last) for first, last in pairwise(edges.tolist()) if last > first]
    return Curve(
        [float(steps[one].mean()) for one in ranges],
        [float(values[one].mean()) for one in ranges],
        [float(values[one].min()) for one in ranges],
        [float(values[one].max()) for one in ranges],
    )


def run_figures(run: RunRecord) -> list[Markup]:
    """Loss, speed, then routers where the model has some."""
    said = {
        "loss": ("Loss", "mean cross entropy, nats a token"),
        "grad_norm": ("Gradient norm before clipping", "norm"),
        "useful_tokens_per_second": ("Throughput", "useful tokens a second, all ranks"),
        "seconds": ("Step time", "seconds"),
    }
    found = [
        curve_figure(run.columns, name, *words, validation_curves(run) if name == "loss" else {})
        for name, words in said.items()
    ]
    return [each for each in found if each is not None]


def validation_curves(run: RunRecord) -> dict[str, Curve]:
    """The losses of the validation sets over steps, by the name of the set."""
    found = {}
    for name, losses in run.validation.items():
        steps = sorted(losses)
        found[name] = thinned(np.array(steps), np.array([losses[step] for step in steps]))
    return {name: curve for name, curve in found.items() if curve.steps}


def router_figures(run: RunRecord) -> list[Markup]:
    said = {
        "router/load_max": ("Busiest expert over the mean", "times the mean load; 1 is level"),
        "router/rank_load_max": ("Largest expert rank over the mean", "times the mean load; the others wait for it"),
        "router/entropy": ("Entropy of the routers", "nats"),
        "router/dropped": ("Tokens dropped", "share of the rows"),
    }
    found = [curve_figure(run.columns, name, *words) for name, words in said.items()]
    found += [loads_figure(run.loads)] if run.loads else []
    return [each for each in found if each is not None]


def load_table(load: LoadSummary) -> list[Markup]:
    """The recorded loads of each layer, and what they cost."""
    header, rows = load.table()
    return [
        tag("h3", "Recorded loads"),
        tag("p", ". ".join([load.summary(), *lost_text(load)])),
        html_table(header, rows),
    ]


def curve_figure(
    columns: Mapping[str, Column],
    name: str,
    title: str,
    unit: str,
    validation: Mapping[str, Curve] | None = None,
    over: str = "step",
) -> Markup | None:
    """A column of a run over its steps, with the same on validation sets; None where nothing was logged.

    `over` says what the column `step` counts, where it is no step.
    """
    values, num_steps = columns.get(name), len(columns["step"])
    curve = thinned(columns["step"], values) if values is not None else None
    if curve is None or not curve.steps:
        return None
    beside = validation or {}
    top, bottom = 30.0, 210.0
    low = min(min(each.least) for each in (curve, *beside.values()))
    high = max(max(each.most) for each in (curve, *beside.values()))
    if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-12):  # a level line in the middle, or on the ground for zero
        low, high = (0.0, 2 * high if high > 1e-12 else 1.0) if high >= 0 else (min(2 * low, -1e-12), 0.0)
    pad = 0.04 * (high - low)
    low, high = (max(0.0, low - pad) if low >= 0 else low - pad), high + pad
    first = min(each.steps[0] for each in (curve, *beside.values()))
    last = max(first + 1, *(each.steps[-1] for each in (curve, *beside.values())))

    def x_of(step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - 12) * (step - first) / (last - first or 1.0)

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    ticks = nice_ticks(low, high, 5)
    steps = [each for each in nice_ticks(first, last, 8) if each == int(each)]
    parts = [y_axis(y_of, ticks, _LEFT, WIDTH - 12, unit), x_axis(x_of, steps, bottom, bottom, over)]
    parts.append(_envelope(curve, x_of, y_of))
    parts.append(polyline([(x_of(s), y_of(v)) for s, v in zip(curve.steps, curve.mean, strict=True)], "curve"))
    parts += _spots(curve, x_of, y_of, top, bottom, over)
    parts += _validation_marks(beside, x_of, y_of)
    is_thin = num_steps > MOST_POINTS
    thinly = f" Each point is the mean of {num_steps / len(curve.steps):.0f} logged {over}s, " if is_thin else ""
    note = f"Measured.{thinly}{'the band their least and greatest.' if thinly else ''}"
    rows = [
        [f"{s:.0f}", format_number(m), format_number(a), format_number(b)]
        for s, m, a, b in zip(*_every(curve, 24), strict=True)
    ]
    label = f"{title}: {format_number(curve.mean[0])} at the start, {format_number(curve.mean[-1])} at the end"
    numbers = numbers_table([over, "mean", "least", "greatest"], rows)
    if beside:
        parts.append(legend([("ink", "training"), *_validation_keys(beside)], _LEFT, bottom + 54))
        numbers = join([numbers, _validation_table(beside)])
    return figure(title, note, drawing(bottom + (60 if beside else 38), label, *parts), numbers=numbers)


_VALIDATION_HUES = ("hue-orange", "hue-green", "hue-pink", "hue-red")


def _validation_keys(curves: Mapping[str, Curve]) -> list[tuple[str, str]]:
    hues = (_VALIDATION_HUES[i % len(_VALIDATION_HUES)] for i in range(len(curves)))
    return [(hue, f"validation, {name[:40]}") for hue, name in zip(hues, curves, strict=True)]


def _validation_marks(curves: Mapping[str, Curve], x_of: Scale, y_of: Scale) -> list[Markup]:
    """The curve of each validation set, with a mark at each evaluation."""
    parts = []
    for (hue, said), curve in zip(_validation_keys(curves), curves.values(), strict=True):
        parts.append(polyline([(x_of(s), y_of(v)) for s, v in zip(curve.steps, curve.mean, strict=True)], f"set {hue}"))
        for step, loss, _, _ in zip(*_every(curve, 80), strict=True):
            spot = tag("circle", cx=float(x_of(step)), cy=float(y_of(loss)), r=3.0, class_=hue)
            parts.append(mark(spot, f"{said}, step {step:.0f}: {format_number(loss)}"))
    return parts


def _validation_table(curves: Mapping[str, Curve]) -> Markup:
    rows = [
        [f"{step:.0f}", name, format_number(loss)]
        for name, curve in curves.items()
        for step, loss, _, _ in zip(*_every(curve, 24), strict=True)
    ]
    return numbers_table(["step", "validation set", "loss"], rows)


def _envelope(curve: Curve, x_of: Scale, y_of: Scale) -> Markup:
    above = [(x_of(s), y_of(v)) for s, v in zip(curve.steps, curve.most, strict=True)]
    below = [(x_of(s), y_of(v)) for s, v in zip(curve.steps, curve.least, strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*above, *reversed(below)]) + "Z"
    return tag("path", d=path, class_="envelope")


def _spots(curve: Curve, x_of: Scale, y_of: Scale, top: float, bottom: float, over: str) -> list[Markup]:
    """Invisible columns that say the numbers of their point, and show it while they do."""
    found = []
    every = _every(curve, 80)
    width = (WIDTH - _LEFT - 12) / max(1, len(every[0]))
    for step, mean, least, most in zip(*every, strict=True):
        says = f"{over} {step:.0f}: {format_number(mean)}"
        says += "" if least == most else f" ({format_number(least)} to {format_number(most)})"
        spot = tag("circle", cx=float(x_of(step)), cy=float(y_of(mean)), r=3.5, class_="spot")
        column = rect(x_of(step) - width / 2, top, width, bottom - top, "catch")
        found.append(mark(Markup(column + spot), says))
    return found


def _every(curve: Curve, most: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """About so many points of a curve, the last one among them."""
    count = len(curve.steps)
    places = sorted({round(i * (count - 1) / max(1, min(count, most) - 1)) for i in range(min(count, most))})
    return (
        [curve.steps[i] for i in places],
        [curve.mean[i] for i in places],
        [curve.least[i] for i in places],
        [curve.most[i] for i in places],
    )


def loads_figure(loads: Sequence[Sequence[float]], when: str = "in the last step") -> Markup:
    """Tokens of each expert, layer by layer, over the layer's mean."""
    shown = loads[:MOST_LAYERS]
    num_experts = max(len(row) for row in shown)
    together = -(-num_experts // MOST_EXPERTS)
    columns = -(-num_experts // together)
    height = 18.0 if len(shown) <= 16 else 9.0
    cell, top = (WIDTH - _LEFT - 12) / columns, 8.0
    parts = []
    for number, row in enumerate(shown):
        mean = sum(row) / len(row) or 1.0
        y = top + number * height
        if height > 12 or number % 4 == 0:
            parts.append(text(_LEFT - 10, y + height - 4, f"MoE layer {number}", "tick", "end"))
        for place in range(0, len(row), together):
            part = row[place : place + together]
            load = max(part) / mean
            named = f"expert {place}" if together == 1 else f"experts {place} to {place + len(part) - 1}, busiest"
            x = _LEFT + place // together * cell
            shape = rect(x, y, max(0.6, cell - 0.8), height - 1.5, _load_class(load))
            parts.append(
                mark(shape, f"MoE layer {number}, {named}: {load:.2f} times the mean, {max(part):,.0f} tokens")
            )
    bottom = top + len(shown) * height
    parts.append(text(_LEFT, bottom + 16, "expert 0", "tick"))
    parts.append(text(WIDTH - 12, bottom + 16, f"expert {num_experts - 1}", "tick", "end"))
    parts += _load_legend(bottom + 36)
    busiest = [max(row) / (sum(row) / len(row) or 1.0) for row in loads]
    rows = [
        [str(i), f"{each:.2f}", str(sum(v == 0 for v in row)), format_count(sum(row))]
        for i, (each, row) in enumerate(zip(busiest, loads, strict=True))
    ]
    left_out = f" The first {MOST_LAYERS} of {len(loads)} layers are drawn." if len(loads) > MOST_LAYERS else ""
    return figure(
        f"Load of every expert {when}",
        f"Measured, over the mean of its layer: the busiest expert of all has {max(busiest):.2f} times it.{left_out}",
        drawing(bottom + 44, f"loads of {num_experts} experts in {len(loads)} layers", *parts),
        numbers=numbers_table(["MoE layer", "busiest over mean", "idle experts", "rows"], rows),
    )


_LOADS = (0.01, 0.5, 0.8, 1.25, 2.0, 4.0)  # bounds of the classes of a load


def _load_class(load: float) -> str:
    return f"load{sum(load >= bound for bound in _LOADS)}"


def _load_legend(y: float) -> list[Markup]:
    names = ["idle", "to 0.5", "to 0.8", "to 1.25", "to 2", "to 4", "more"]
    parts, x = [text(_LEFT, y, "times the mean", "tick")], _LEFT + 110
    for number, name in enumerate(names):
        parts += [rect(x, y - 9, 14, 11, f"load{number}"), text(x + 18, y, name, "tick")]
        x += 76
    return parts


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
