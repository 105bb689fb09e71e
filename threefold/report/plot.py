"""Pictures, for those who have matplotlib: `pip install threefold[report]`."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from threefold.plan.terms import RESERVE_TERMS
from threefold.report.sweep import value_text
from threefold.search.sweep import Point, Sweep
from threefold.units import GIB

# What the terms of a rank's memory are for; terms named nowhere are activations.
_GROUPS = {
    "weights and gradients": ("weights", "quantised_weights", "gradients"),
    "optimizer": ("optimizer",),
    "for a moment": ("recompute", "overlap", "graphs", "workspace"),
    "reserve": tuple(name for name in RESERVE_TERMS if name != "attention_in_graphs"),
}
_ORDER = ("weights and gradients", "optimizer", "activations", "for a moment", "reserve")
_COLOURS = ("#3b5b92", "#7f9ccb", "#d9822b", "#f0c27b", "#c9c9c9")


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
    axes.fill_between(places, low, high, color=_COLOURS[1], alpha=0.3, linewidth=0, label="error band")
    axes.plot(places, reached, "o-", color=_COLOURS[0], label="predicted")
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
    """Bars of the fullest stage; hatched where it does not fit."""
    bottoms = [0.0] * len(found.points)
    for name, colour in zip(_ORDER, _COLOURS, strict=True):
        heights = [_group(point, name) / GIB for point in found.points]
        bars = axes.bar(range(len(heights)), heights, 0.6, bottom=bottoms, color=colour, label=name)
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
    axes.set_ylabel("GiB on the fullest GPU")
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
