"""Memory against the chip (the largest stage term by term, a bar a stage), where a step's time goes, and the walls."""

from dataclasses import dataclass
from itertools import groupby

from threefold.cost.estimate import MEMORY_BOUND, WALL_SHARES, WALLS, Estimate
from threefold.cost.memory.stage_memory import StageMemory
from threefold.plan.plan import Plan
from threefold.plan.terms import MEMORY_TERMS, RESERVE_TERMS
from threefold.report.html.markup import Markup, join
from threefold.report.html.palette import MEMORY_GROUPS, WALL_CLASSES, memory_class, memory_group, time_class, wall_of
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
from threefold.units import GIB, MIB, format_bytes, format_number

MOST_BARS = 24  # stages, or runs of equal ones
OFF_SCALE = 8.0  # a chip with more than so many times the need is named at the edge
_LEFT, _RIGHT, _ROW = 170.0, 110.0, 24.0


def memory_figures(plan: Plan, found: Estimate) -> list[Markup]:
    """The waterfall; below it the stages, where there are several."""
    figures = [waterfall_figure(plan, found)]
    return [*figures, stages_figure(plan, found)] if len(found.memory.stages) > 1 else figures


def waterfall_figure(plan: Plan, found: Estimate) -> Markup:
    """The terms of the largest stage, each from where the one before it ends, up to the chip's memory."""
    worst, chip = found.memory.worst, float(plan.chip.memory_bytes)
    terms = [(name, size) for name, size in in_order(worst) if size > worst.device_bytes / 500]
    low, high = found.device_bytes_band
    scale = _Scale.up_to(max(worst.device_bytes, high), chip)
    x_of, unit = scale.x_of, scale.unit_bytes
    bottom = 30 + _ROW * (len(terms) + 1)
    parts = [scale.axis(22, bottom), _chip_line(plan, scale, 22, bottom)]
    done = 0.0
    for number, (name, size) in enumerate(terms):
        y = 30 + _ROW * number
        says = f"{name}: {format_bytes(size)}, {size / worst.device_bytes:.1%} of the device's bytes"
        parts.append(text(_LEFT - 10, y + 14, name.replace("_", " "), "label", "end"))
        shape = rect(x_of(done), y + 2, max(1.5, x_of(done + size) - x_of(done)), _ROW - 6, memory_class(name))
        parts.append(mark(shape, says))
        parts.append(text(x_of(done + size) + 6, y + 14, f"{size / unit:.2f}", "tick"))
        done += size
    y = 30 + _ROW * len(terms)
    parts.append(text(_LEFT - 10, y + 14, "= on the device", "strong", "end"))
    parts.append(mark(rect(x_of(0), y + 2, x_of(worst.device_bytes) - x_of(0), _ROW - 6, _verdict(found)), _sum(found)))
    parts += [line(x_of(low), y + 11, x_of(high), y + 11, "whisker")]
    parts += [line(x_of(each), y + 6, x_of(each), y + 16, "whisker") for each in (low, high)]
    parts.append(text(x_of(high) + 6, y + 14, f"{worst.device_bytes / unit:.1f}", "strong"))
    label = f"memory of stage {worst.stage} by term: {_sum(found)}, of {format_bytes(chip)}"
    rows = [[name, format_bytes(size), f"{size / worst.device_bytes:.1%}"] for name, size in in_order(worst) if size]
    rows.append(["= on the device", format_bytes(worst.device_bytes), "100.0%"])
    return figure(
        f"Memory of the largest rank, stage {worst.stage}",
        f"The peak comes at {worst.moment}. The line across the sum is the band of the estimate, "
        f"{format_bytes(low)} to {format_bytes(high)}.",
        drawing(bottom + 60, label, *parts, _legend(terms, bottom + 54)),
        numbers=numbers_table(["term", "size", "share"], rows),
    )


def in_order(stage: StageMemory) -> list[tuple[str, float]]:
    """Terms of a stage, group by group."""
    sizes = {**stage.terms, **stage.reserve}
    groups = list(MEMORY_GROUPS)
    names = [*MEMORY_TERMS, *RESERVE_TERMS]
    known = sorted(sizes, key=lambda name: (groups.index(memory_group(name)), names.index(name)))
    return [(name, sizes[name]) for name in known]


def _sum(found: Estimate) -> str:
    headroom = found.headroom_bytes
    left = f"{format_bytes(headroom)} left" if headroom >= 0 else f"{format_bytes(-headroom)} too much"
    return f"{format_bytes(found.memory.device_bytes)} on the device, {left}"


def _verdict(found: Estimate) -> str:
    return "fits" if found.fits else "misfits"


@dataclass(frozen=True, slots=True)
class _Scale:
    """From bytes to places, up to `most`; its axis counts in units of `unit_bytes`."""

    most: float
    unit_bytes: int

    @classmethod
    def up_to(cls, need: float, chip: float) -> "_Scale":
        """With the chip's memory on it, unless that is so much that nothing else would be seen."""
        most = 1.3 * need if chip > OFF_SCALE * need else 1.04 * max(chip, need)
        return cls(most, GIB if most >= 2 * GIB else MIB)

    def x_of(self, num_bytes: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * num_bytes / self.most

    def axis(self, top: float, bottom: float) -> Markup:
        unit = "GiB" if self.unit_bytes == GIB else "MiB"
        ticks = nice_ticks(0, self.most / self.unit_bytes)
        return x_axis(lambda tick: self.x_of(tick * self.unit_bytes), ticks, top, bottom, f"{unit} on the device")


def _chip_line(plan: Plan, scale: _Scale, top: float, bottom: float) -> Markup:
    said = f"{plan.chip.name}: {plan.chip.memory_bytes / GIB:.0f} GiB"
    if plan.chip.memory_bytes > scale.most:
        return text(WIDTH - 4, top - 9, f"{said} →", "limittext", "end")
    x = scale.x_of(plan.chip.memory_bytes)
    anchor = "end" if x > WIDTH - 120 else "middle"
    return join([line(x, top - 4, x, bottom, "limit"), text(x, top - 9, said, "limittext", anchor)])


def _legend(terms: list[tuple[str, float]], y: float) -> Markup:
    used = {memory_group(name) for name, size in terms if size > 0}
    return legend([(hue, name) for name, (hue, _) in MEMORY_GROUPS.items() if name in used], _LEFT, y)


def stages_figure(plan: Plan, found: Estimate) -> Markup:
    """One bar a stage, stacked by term; neighbors that are alike share a bar."""
    runs = _runs(found.memory.stages)
    shown = runs[:MOST_BARS]
    scale = _Scale.up_to(max(run[0].device_bytes for run in shown), float(plan.chip.memory_bytes))
    x_of, unit = scale.x_of, scale.unit_bytes
    bottom = 26 + _ROW * len(shown)
    parts = [scale.axis(22, bottom)]
    for number, run in enumerate(shown):
        y, done = 26 + _ROW * number, 0.0
        stage = run[0]
        parts.append(text(_LEFT - 10, y + 15, _run_name(run), "label", "end"))
        for name, size in in_order(stage):
            if size <= 0:
                continue
            width = x_of(done + size) - x_of(done)
            parts.append(
                mark(
                    rect(x_of(done), y + 3, max(0.4, width - 0.6), _ROW - 6, memory_class(name)),
                    f"{_run_name(run)}, {name.replace('_', ' ')}: {format_bytes(size)}",
                )
            )
            if fits(name.replace("_", " "), width):
                parts.append(text(x_of(done) + width / 2, y + 15, name.replace("_", " "), "onfill", "middle"))
            done += size
        parts.append(text(x_of(done) + 6, y + 15, f"{done / unit:.1f}", "tick"))
    parts.append(_chip_line(plan, scale, 22, bottom))
    left_out = f" The first {MOST_BARS} of {len(runs)} different stages are drawn." if len(runs) > MOST_BARS else ""
    rows = [
        [_run_name(run), format_bytes(run[0].peak_bytes), format_bytes(run[0].device_bytes), run[0].moment]
        for run in runs
    ]
    return figure(
        "Memory by pipeline stage",
        f"Stages that need the same share a bar.{left_out}",
        drawing(bottom + 60, "memory of every stage by term", *parts, _legend(in_order(shown[0][0]), bottom + 54)),
        numbers=numbers_table(["stage", "allocated", "on the device", "moment of the peak"], rows),
    )


def _runs(stages: tuple[StageMemory, ...]) -> list[list[StageMemory]]:
    def printed(stage: StageMemory) -> tuple[str, ...]:
        return tuple(f"{name}{format_bytes(size)}" for name, size in in_order(stage))

    return [list(run) for _, run in groupby(stages, key=printed)]


def _run_name(run: list[StageMemory]) -> str:
    return f"stage {run[0].stage}" if len(run) == 1 else f"stages {run[0].stage} to {run[-1].stage}"


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
