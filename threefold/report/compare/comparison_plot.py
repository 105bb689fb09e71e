"""What explains a change as a picture, for those who have matplotlib: `pip install threefold[report]`."""

from matplotlib.figure import Figure

from threefold.compare.comparison import Comparison
from threefold.report.compare.comparison_text import seconds_text, value_text, verdict_text

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
    for place, (_, start, length, colour) in enumerate(bars):
        axes.barh(place, length, left=start, color=colour, height=0.62)
        text = seconds_text(length) if colour == _WHOLE else f"{'+' if length >= 0 else '-'}{seconds_text(abs(length))}"
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
    """The title of the axis, and name, start, length and colour of each bar."""
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
    for name, amount, colour in steps:
        bars.append((name, at, amount, colour or (_MORE if amount > 0 else _LESS)))
        at += amount
    return title, [*bars, ("B", 0.0, after, _WHOLE)]


def _name(fields: dict[str, tuple[object, object]]) -> str:
    text = "\n".join(f"{path} {value_text(old)} -> {value_text(new)}" for path, (old, new) in list(fields.items())[:3])
    return text if len(fields) <= 3 else f"{text}\nand {len(fields) - 3} more"
