"""Draws a profile: where the time of each device went, and communication by axis. Needs `threefold[report]`.

A page (.html) has the drawing and the text of the terminal in one file, without anything from a network.
"""

from html import escape
from io import StringIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from threefold.profile.analyse import Profile
from threefold.profile.measure import DeviceWalls
from threefold.report.html.profile_picture import time_by_part
from threefold.report.profile import profile_text

MAX_DEVICES = 32
_COLOURS = {
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
    for name, colour in _COLOURS.items():
        widths = [time_by_part(device)[name] for device in devices]
        axes.barh(range(len(devices)), widths, left=left, color=colour, label=name)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(devices)), [device.name for device in devices], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the span")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=7, ncols=len(_COLOURS), frameon=False)


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
