"""Pictures of sweeps, profiles, rehearsals and comparisons. They need matplotlib: `pip install threefold[report]`."""

from html import escape
from io import StringIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from threefold.compare.comparison import Comparison
from threefold.dryrun.rehearse_plan import Rehearsal
from threefold.plan.terms import RESERVE_TERMS
from threefold.profile.analyze import Profile
from threefold.profile.measure import DeviceWalls
from threefold.report.compare.comparison_text import seconds_text, verdict_text
from threefold.report.compare.comparison_text import value_text as field_text
from threefold.report.html.run_pictures import time_by_part
from threefold.report.profile import profile_text
from threefold.report.sweep import value_text
from threefold.search.sweep import Point, Sweep
from threefold.units import GIB

# What the terms of a rank's memory are for; terms named nowhere are activations.
_GROUPS = {
    "weights and gradients": ("weights", "quantized_weights", "gradients"),
    "optimizer": ("optimizer",),
    "for a moment": ("recompute", "overlap", "graphs", "workspace"),
    "reserve": tuple(name for name in RESERVE_TERMS if name != "attention_in_graphs"),
}
_ORDER = ("weights and gradients", "optimizer", "activations", "for a moment", "reserve")
_COLORS = ("#3b5b92", "#7f9ccb", "#d9822b", "#f0c27b", "#c9c9c9")


def plot_sweep(found: Sweep, path: str) -> None:
    """Write the picture of a sweep."""
    sweep_figure(found).savefig(path)


def sweep_figure(found: Sweep) -> Figure:
    """Throughput with its band above, memory by group below, one column a value."""
    wide = max(7.0, 1.1 * len(found.points) + 2.5)
    figure = Figure(figsize=(wide, 7.0), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.1))
    plan = found.points[0].plan
    figure.suptitle(f"{plan.model_name} on {plan.chip.name}, {plan.target}: estimated", fontsize=12)
    _throughput(above, found)
    _memory(below, found)
    labels = [_label(found.path, point) for point in found.points]
    below.set_xticks(range(len(labels)), labels, fontsize=8)
    below.set_xlabel(found.path)
    return figure


def _label(path: str, point: Point) -> str:
    layout = point.plan.layout
    degrees = f"TP{layout.tp} CP{layout.cp} DP{layout.dp}\nPP{layout.pp} EP{layout.ep}"
    gpus = f"{'needs ' if point.more_gpus else ''}{layout.gpus} GPUs"
    return f"{value_text(path, point.value)}\n{degrees}\n{gpus}"


def _throughput(axes: Axes, found: Sweep) -> None:
    known = [(i, point.estimate) for i, point in enumerate(found.points) if point.estimate]
    places = [i for i, _ in known]
    reached = [guess.model_tflops_per_gpu for _, guess in known]
    # Throughput is the inverse of time: the band of the step turns over.
    low = [r * guess.time.step_seconds / guess.seconds_band[1] for r, (_, guess) in zip(reached, known, strict=True)]
    high = [r * guess.time.step_seconds / guess.seconds_band[0] for r, (_, guess) in zip(reached, known, strict=True)]
    axes.fill_between(places, low, high, color=_COLORS[1], alpha=0.3, linewidth=0, label="error band")
    axes.plot(places, reached, "o-", color=_COLORS[0], label="predicted")
    for place, value in zip(places, reached, strict=True):
        axes.annotate(
            f"{value:.0f}", (place, value), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9
        )
    for place, point in enumerate(found.points):
        if point.estimate is None:
            axes.annotate("refused", (place, 0), xytext=(0, 4), textcoords="offset points", ha="center", color="#a33")
    axes.set_ylim(0, 1.15 * max(high, default=1.0))
    axes.set_ylabel("TFLOP/s a GPU")
    axes.grid(axis="y", alpha=0.3)
    _legend_above(axes)


def _memory(axes: Axes, found: Sweep) -> None:
    """Bars of the largest stage; hatched where it does not fit."""
    bottoms = [0.0] * len(found.points)
    for name, color in zip(_ORDER, _COLORS, strict=True):
        heights = [_group(point, name) / GIB for point in found.points]
        bars = axes.bar(range(len(heights)), heights, 0.6, bottom=bottoms, color=color, label=name)
        for bar, point in zip(bars, found.points, strict=True):
            if point.estimate and not point.estimate.fits:
                bar.set_hatch("//")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    room = found.points[0].plan.chip.memory_bytes / GIB
    axes.axhline(room, color="#a33", linewidth=1.2)
    axes.annotate(
        f"{found.points[0].plan.chip.name}: {room:.0f} GiB", (0, room), xycoords=("axes fraction", "data"),
        xytext=(4, 3), textcoords="offset points", color="#a33", fontsize=9,
    )  # fmt: skip
    axes.set_ylim(0, 1.25 * max([room, *bottoms]))
    axes.set_ylabel("GiB on the largest GPU")
    _legend_above(axes)


def _legend_above(axes: Axes) -> None:
    """Outside of the axes, where it covers neither bars nor labels."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        fontsize=8,
        ncols=5,
        columnspacing=1.0,
        handlelength=1.2,
        frameon=False,
    )


def _group(point: Point, name: str) -> float:
    if point.estimate is None:
        return 0.0
    worst = point.estimate.memory.worst
    parts = {**worst.terms, **worst.reserve}
    if name in _GROUPS:
        return sum(parts.get(term, 0.0) for term in _GROUPS[name])
    grouped = {term for terms in _GROUPS.values() for term in terms}
    return sum(value for term, value in parts.items() if term not in grouped)


MAX_DEVICES = 32
_PART_COLORS = {
    "compute": "#3b5b92",
    "exposed communication": "#d9822b",
    "unknown": "#a33",
    "copies alone": "#c9c9c9",
    "idle": "#f0e6d2",
}
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em; max-width: 70em }} pre {{ overflow-x: auto }}</style></head>
<body><h1>{title}</h1>
{drawing}
<pre>{text}</pre></body></html>
"""


def write_picture(found: Profile, path: Path) -> None:
    """Write a picture in the format that the name ends in."""
    figure = profile_figure(found)
    if path.suffix != ".html":
        figure.savefig(path)
        return
    drawing = StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    page = _PAGE.format(title=escape(_title(found)), drawing=svg[svg.index("<svg") :], text=escape(profile_text(found)))
    path.write_text(page, encoding="utf-8")


def profile_figure(found: Profile) -> Figure:
    """A bar a device above, a pair of bars an axis below."""
    devices = sorted(found.devices, key=lambda device: -device.span_seconds)[:MAX_DEVICES]
    axes_rows = max(1, len(found.top.by_axis))
    heights = (0.4 * len(devices) + 1.0, 0.4 * axes_rows + 0.8)
    figure = Figure(figsize=(9.0, sum(heights) + 1.2), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    figure.suptitle(_title(found), fontsize=11)
    _draw_devices(above, devices)
    _draw_axes(below, found.top)
    return figure


def _title(found: Profile) -> str:
    return f"{found.top.name}: the wall is {found.diagnosis.dominant} (confidence {found.diagnosis.confidence:.0%})"


def _draw_devices(axes: Axes, devices: list[DeviceWalls]) -> None:
    left = [0.0] * len(devices)
    for name, color in _PART_COLORS.items():
        widths = [time_by_part(device)[name] for device in devices]
        axes.barh(range(len(devices)), widths, left=left, color=color, label=name)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(devices)), [device.name for device in devices], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the span")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=7, ncols=len(_PART_COLORS), frameon=False)


def _draw_axes(axes: Axes, top: DeviceWalls) -> None:
    names = list(top.by_axis)
    axes.set_title(f"communication of {top.name} by axis", fontsize=9)
    if not names:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no communication was seen", ha="center", transform=axes.transAxes)
        return
    found = list(top.by_axis.values())
    axes.barh(range(len(names)), [one.total_seconds for one in found], color="#7f9ccb", label="total")
    axes.barh(range(len(names)), [one.exposed_seconds for one in found], 0.4, color="#d9822b", label="exposed")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(fontsize=7)


def plot_rehearsal(found: Rehearsal, path: str) -> None:
    """Write a picture with one line for each rank and the chip's memory as a dashed line."""
    figure = Figure(figsize=(9.0, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for rank in found.ranks:
        x = [point["change"] / max(1, rank.timeline[-1]["change"]) for point in rank.timeline]
        axes.plot(x, [point["bytes"] / GIB for point in rank.timeline], linewidth=0.9, label=f"stage {rank.stage}")
    chip_gib = found.plan.chip.memory_bytes / GIB
    axes.axhline(chip_gib, color="black", linestyle="--", linewidth=0.8, label=f"memory of {found.plan.chip.name}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("one step, by allocations and releases")
    axes.set_ylabel("live tensors, GiB")
    axes.set_title(f"{found.plan.model_name} on {found.plan.layout.gpus} x {found.plan.chip.name}: rehearsed")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path)


MOST_BARS = 12
_WHOLE, _MORE, _LESS, _REST = "#3b5b92", "#d9822b", "#6a9f58", "#c9c9c9"


def plot_comparison(found: Comparison, path: str) -> None:
    """Write a waterfall from A's step to B's. Raises ValueError where nothing is explained."""
    comparison_figure(found).savefig(path)


def comparison_figure(found: Comparison) -> Figure:
    """Bars from top to bottom: A, one a part of the change, B; each part begins where the one above it ends."""
    title, bars = _bars(found)
    figure = Figure(figsize=(9.0, 1.6 + 0.42 * len(bars)), dpi=130, layout="constrained")
    axes = figure.subplots()
    for place, (_, start, length, color) in enumerate(bars):
        axes.barh(place, length, left=start, color=color, height=0.62)
        text = seconds_text(length) if color == _WHOLE else f"{'+' if length >= 0 else '-'}{seconds_text(abs(length))}"
        axes.annotate(
            text,
            (max(start, start + length), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(title)
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle(verdict_text(found.speed) if found.speed else f"{found.a.name} and {found.b.name}", fontsize=10)
    return figure


def _bars(found: Comparison) -> tuple[str, list[tuple[str, float, float, str]]]:
    """The title of the axis, and name, start, length and color of each bar."""
    if found.seconds is not None:
        title = (
            "seconds of a step" if found.unit == "step" else f"seconds for the work of a step of A, per {found.unit}"
        )
        before, after = found.seconds.before, found.seconds.after
        shown = found.seconds.parts[:MOST_BARS]
        steps = [(_name(part.fields), part.amount, "") for part in shown]
        rest = found.seconds.change - sum(part.amount for part in shown)
        steps += [("unexplained", rest, _REST)] if abs(rest) > 1e-9 * abs(before) else []
    elif found.traced is not None:
        title = f"seconds a {found.traced.per}, of the traces"
        before, after = found.traced.span.a, found.traced.span.b
        steps = [(row.name, row.b - row.a, "") for row in found.traced.parts]
    else:
        raise ValueError("nothing is explained that could be drawn")
    bars, at = [("A", 0.0, before, _WHOLE)], before
    for name, amount, color in steps:
        bars.append((name, at, amount, color or (_MORE if amount > 0 else _LESS)))
        at += amount
    return title, [*bars, ("B", 0.0, after, _WHOLE)]


def _name(fields: dict[str, tuple[object, object]]) -> str:
    text = "\n".join(f"{path} {field_text(old)} -> {field_text(new)}" for path, (old, new) in list(fields.items())[:3])
    return text if len(fields) <= 3 else f"{text}\nand {len(fields) - 3} more"
