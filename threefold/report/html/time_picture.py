"""Where the time of a step goes, and how near each wall is."""

from threefold.cost.estimate import MEMORY_BOUND, WALL_SHARES, WALLS, Estimate
from threefold.plan.plan import Plan
from threefold.report.html.markup import Markup
from threefold.report.html.palette import WALL_CLASSES, time_class, wall_of
from threefold.report.html.svg import (
    WIDTH,
    drawing,
    figure,
    fits,
    legend,
    line,
    mark,
    nice_ticks,
    numbers_table,
    rect,
    text,
    x_axis,
)
from threefold.units import format_number

_LEFT, _RIGHT = 170.0, 110.0
_AFTER = ("bubble", "dp", "optimizer", "offload", "other")  # what comes once a step, not with every microbatch


def time_figure(plan: Plan, found: Estimate) -> Markup:
    """The step as one bar in parts, and a row a term below, longest first. All begin at zero: it is no schedule."""
    step, terms = found.time.step_seconds, found.time.terms
    spent = [(name, seconds) for name, seconds in terms.items() if seconds > 0]
    spent.sort(key=lambda term: (term[0] in _AFTER, list(WALLS).index(wall_of(term[0]) or "host")))
    low, high = found.seconds_band
    most = 1.02 * max(step, high)
    rows = [term for term in sorted(spent, key=lambda term: -term[1]) if term[1] > step / 400]
    bottom = 62 + 20 * len(rows)

    def x_of(seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * seconds / most

    parts = [x_axis(x_of, nice_ticks(0, most), 4, bottom, "seconds of a step")]
    parts.append(text(_LEFT - 10, 28, "step", "strong", "end"))
    done = 0.0
    for name, seconds in spent:
        width = x_of(done + seconds) - x_of(done)
        shape = rect(x_of(done), 10, max(0.4, width - 0.6), 28, time_class(name))
        parts.append(mark(shape, _says(name, seconds, step)))
        if fits(name, width):
            parts.append(text(x_of(done) + width / 2, 28, name, "onfill", "middle"))
        done += seconds
    parts += [line(x_of(low), 46, x_of(high), 46, "whisker")]
    parts += [line(x_of(each), 42, x_of(each), 50, "whisker") for each in (low, high)]
    parts.append(text(x_of(step) + 6, 28, f"{format_number(step)} s", "strong"))
    parts.append(text(x_of(high) + 6, 50, "band", "tick"))
    for number, (name, seconds) in enumerate(rows):
        y = 58 + 20 * number
        parts.append(text(_LEFT - 10, y + 13, name, "label", "end"))
        width = max(1.2, x_of(seconds) - x_of(0))
        parts.append(mark(rect(x_of(0), y + 3, width, 13, time_class(name)), _says(name, seconds, step)))
        parts.append(text(x_of(seconds) + 6, y + 13, f"{seconds / step:.1%}", "tick"))
    keys = [(WALL_CLASSES[wall], wall) for wall in WALLS if any(wall_of(name) == wall for name, _ in spent)]
    table = [
        [name, format_number(seconds), f"{seconds / step:.1%}", wall_of(name)]
        for name, seconds in sorted(spent, key=lambda term: -term[1])
    ]
    pipeline = f" Terms of layers are those of stage {found.time.stage}, the slowest." if plan.layout.pp > 1 else ""
    return figure(
        "Where a step's time goes",
        f"Estimated, summed over the step; the thin line is the band, {format_number(low)} to {format_number(high)} s. "
        f"What is hidden under other work is in no term.{pipeline}",
        drawing(bottom + 60, f"a step of {step:.4g} s by term", *parts, legend(keys, _LEFT, bottom + 54)),
        numbers=numbers_table(["term", "seconds", "share", "wall"], table),
    )


def _says(name: str, seconds: float, step: float) -> str:
    return f"{name}: {format_number(seconds)} s, {seconds / step:.1%} of the step ({wall_of(name)})"


def walls_figure(plan: Plan, found: Estimate) -> Markup:
    """One bar a wall, with the share from which it counts as one."""
    step, terms = found.time.step_seconds, found.time.terms
    shares = {
        "memory": (found.memory.device_bytes / plan.chip.memory_bytes, MEMORY_BOUND, "of the chip's memory"),
        **{
            wall: (sum(terms[name] for name in WALLS[wall]) / step, bound, "of the step")
            for wall, bound in WALL_SHARES.items()
        },
    }
    return shares_figure(
        f"The wall is {found.wall}",
        "A wall counts from the mark on its bar. Memory binds before all others where it is nearly full, or would be "
        "if whole layers were not recomputed.",
        shares,
        found.wall,
    )


def shares_figure(title: str, note: str, shares: dict[str, tuple[float, float, str]], first: str) -> Markup:
    """Bars of shares with marks: by name the share, where it begins to count, and what it is a share of."""
    most = max(1.0, *(share for share, _, _ in shares.values()))
    bottom = 10 + 26 * len(shares)

    def x_of(share: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(share, most) / most

    parts = [x_axis(lambda tick: x_of(tick / 100), nice_ticks(0, 100 * most), 4, bottom, "percent")]
    for number, (wall, (share, bound, of)) in enumerate(shares.items()):
        y = 8 + 26 * number
        parts.append(text(_LEFT - 10, y + 15, wall, "strong" if wall == first else "label", "end"))
        shape = rect(x_of(0), y + 3, x_of(share) - x_of(0), 17, WALL_CLASSES.get(wall, "hue-gray"))
        parts.append(mark(shape, f"{wall}: {share:.1%} {of}; a wall from {bound:.0%}"))
        parts.append(line(x_of(bound), y, x_of(bound), y + 23, "limit"))
        x = x_of(share) + 6
        x = x_of(bound) + 6 if x - 6 <= x_of(bound) <= x + 30 else x  # the mark would cross the number
        parts.append(text(x, y + 16, f"{share:.0%}", "strong" if wall == first else "tick"))
    rows = [[wall, f"{share:.1%}", of, f"{bound:.0%}"] for wall, (share, bound, of) in shares.items()]
    label = "; ".join(f"{wall} {share:.0%}" for wall, (share, _, _) in shares.items())
    return figure(
        title, note, drawing(bottom + 38, label, *parts), numbers=numbers_table(["wall", "share", "of", "from"], rows)
    )
