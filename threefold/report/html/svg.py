"""Parts that all drawings share: the frame, axes with units, marks that say their numbers, legends.

A drawing is `WIDTH` units wide; on a narrow screen it scrolls sideways, so that text stays readable. Colors are
classes of `style.css`, so that a drawing follows the light or dark page. A mark carries its numbers in `<title>`;
`page.js` shows them on hover and lets the arrow keys go from mark to mark.
"""

import math
from collections.abc import Callable, Sequence

from threefold.report.html.markup import Attribute, Markup, details, html_table, join, tag

WIDTH = 960.0
CHARACTER = 6.4  # mean width of a character of a label


def drawing(height: float, label: str, *children: Markup) -> Markup:
    """The frame of a drawing. `label` says what it shows, for those who do not see it."""
    svg = tag(
        "svg",
        *children,
        viewBox=f"0 0 {WIDTH:g} {math.ceil(height)}",
        role="group",
        aria_label=label,
        tabindex=0,
        class_="drawing",
    )
    return tag("div", svg, class_="scroll")


def figure(title: str, note: str, *children: Markup, numbers: Markup | None = None) -> Markup:
    """A drawing with a heading above it, what to know about it, and its numbers as a table to unfold."""
    more = [details("Numbers", numbers)] if numbers is not None else []
    said = [tag("p", note, class_="note")] if note else []
    return tag("figure", tag("figcaption", title), *said, *children, *more)


def numbers_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    return html_table(header, rows)


def mark(shape: Markup, says: str, **attributes: Attribute) -> Markup:
    """A shape that says its numbers."""
    return tag("g", tag("title", says), shape, class_="mark", **attributes)


def rect(x: float, y: float, width: float, height: float, class_: str, **attributes: Attribute) -> Markup:
    return tag(
        "rect", x=float(x), y=float(y), width=max(0.0, float(width)), height=float(height), class_=class_, **attributes
    )


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> Markup:
    """One line of text; `anchor` is "start", "middle" or "end"."""
    placed = None if anchor == "start" else anchor
    return tag("text", words, x=float(x), y=float(y), class_=class_ or None, text_anchor=placed)


def fits(words: str, width: float) -> bool:
    """Whether a label has room in so many units."""
    return len(words) * CHARACTER + 6 <= width


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999), power * 10)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """A tick as short as its neighbors allow."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(value) or 1.0
    if abs(value) >= 1e5 or (0 < step < 1e-4):
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    digits += 0 if math.isclose(step * 10**digits, round(step * 10**digits), rel_tol=1e-6) else 1
    return f"{value:,.{digits}f}"


def x_axis(scale: Callable[[float], float], ticks: Sequence[float], top: float, bottom: float, unit: str) -> Markup:
    """Grid lines with their numbers below, and the unit at the right end."""
    parts = []
    for value in ticks:
        parts.append(line(scale(value), top, scale(value), bottom, "grid"))
        parts.append(text(scale(value), bottom + 16, tick_text(value, ticks), "tick", "middle"))
    parts.append(text(WIDTH - 4, bottom + 32, unit, "tick", "end"))
    return join(parts)


def y_axis(scale: Callable[[float], float], ticks: Sequence[float], left: float, right: float, unit: str) -> Markup:
    """Grid lines with their numbers at the left, and the unit in the corner above them."""
    parts = []
    for value in ticks:
        parts.append(line(left, scale(value), right, scale(value), "grid"))
        parts.append(text(left - 6, scale(value) + 4, tick_text(value, ticks), "tick", "end"))
    parts.append(text(4, 14, unit, "tick"))
    return join(parts)


def legend(entries: Sequence[tuple[str, str]], x: float, y: float) -> Markup:
    """Small squares with names, in one line: pairs of class and name."""
    parts = []
    for class_, name in entries:
        parts.append(rect(x, y - 9, 11, 11, class_))
        parts.append(text(x + 16, y + 1, name, "tick"))
        x += 16 + len(name) * CHARACTER + 16
    return join(parts)


def polyline(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return tag("path", d=path, class_=class_)
