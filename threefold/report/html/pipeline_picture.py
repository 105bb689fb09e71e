"""The pipeline schedule to scale: one row a pipeline rank, one box a pass, with the seconds of the estimate."""

from collections.abc import Callable, Sequence

from threefold.cost.time.pipeline_timeline import PipelineTimeline, TimedPass
from threefold.plan.plan import Plan
from threefold.report.html.markup import Markup, number, tag
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
from threefold.units import format_many, format_number

MOST_ROWS = 16  # the first and the last ranks of a deeper pipeline
MOST_MARKS = 800  # boxes that say their numbers one by one; more are drawn without
_LEFT = 76.0
_DIGIT = 5.8  # width of a digit in a box
Scale = Callable[[float], float]
_CLASSES = {
    "forward": "hue-blue",
    "backward": "hue-orange",
    "dgrad": "hue-red",
    "wgrad": "hue-green",
    "both": "hue-pink",
}
_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "dgrad": "input gradients",
    "wgrad": "weight gradients",
    "both": "forward and backward together",
}


def pipeline_figure(plan: Plan, found: PipelineTimeline, title: str = "") -> Markup:
    ranks = list(range(len(found.ranks)))
    shown = ranks if len(ranks) <= MOST_ROWS else [*ranks[: MOST_ROWS // 2], *ranks[-MOST_ROWS // 2 :]]
    row = 26.0 if len(shown) <= 8 else 20.0
    bottom = 8 + row * len(shown)

    def x_of(seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT - 8) * seconds / found.seconds

    parts = [x_axis(x_of, nice_ticks(0, found.seconds, 8), 4, bottom, "seconds")]
    says_numbers = sum(len(found.ranks[rank]) for rank in shown) <= MOST_MARKS
    draw = _marks if says_numbers else _paths
    for place, rank in enumerate(shown):
        y = 6 + row * place
        parts.append(rect(_LEFT, y + 1, WIDTH - _LEFT - 8, row - 3, "idle"))
        parts.append(text(_LEFT - 10, y + row / 2 + 4, f"stage {rank}", "label", "end"))
        parts += draw(plan, found.ranks[rank], x_of, y + 1, row - 3)
    kinds = [*dict.fromkeys(_kind(one) for rank in found.ranks for one in rank)]
    keys = [(_CLASSES[kind], _NAMES[kind]) for kind in kinds]
    keys += [("idle", "idle")]
    return figure(
        title or f"Pipeline schedule: {plan.layout.pipeline_schedule}",
        _note(plan, found, len(shown)),
        drawing(
            bottom + 60,
            f"pipeline schedule of {format_many(found.num_microbatches, 'microbatch')} over {len(ranks)} ranks",
            *parts,
            legend(keys, _LEFT, bottom + 54),
        ),
        numbers=numbers_table(["stage", "passes", "busy, s", "idle"], _rows(found)),
    )


def _note(plan: Plan, found: PipelineTimeline, num_shown: int) -> str:
    total, layout = max(1, plan.num_microbatches), plan.layout
    said = f"{format_many(total, 'microbatch')}, {format_many(layout.vpp, 'chunk')} a rank."
    if found.num_microbatches < total:
        said += f" Drawn with {found.num_microbatches} of them: the middle of the step repeats."
    said += (
        f" A rank idles {found.idle_fraction:.1%} of the drawn time. Lighter boxes are later chunks; "
        "forward, input and weight gradients are taken for a third of the work each."
    )
    if num_shown < layout.pp:
        said += f" The first and last {num_shown // 2} of {layout.pp} stages are drawn."
    return said


def _kind(one: TimedPass) -> str:
    return one.passes[0].kind if len(one.passes) == 1 else "both"


def _class(plan: Plan, one: TimedPass) -> str:
    later = one.passes[0].chunk // plan.layout.pp % 2
    return f"{_CLASSES[_kind(one)]}{' light' if later else ''}"


def _marks(plan: Plan, passes: Sequence[TimedPass], x_of: Scale, y: float, height: float) -> list[Markup]:
    parts = []
    for one in passes:
        x, width = x_of(one.start), x_of(one.end) - x_of(one.start)
        what = " and ".join(f"{_NAMES[p.kind]} of microbatch {p.microbatch}, chunk {p.chunk}" for p in one.passes)
        says = f"{what}: {format_number(one.start)} to {format_number(one.end)} s"
        shape = rect(x, y, max(0.5, width - 0.6), height, _class(plan, one))
        label = str(one.passes[0].microbatch)
        shown = (
            [text(x + width / 2, y + height / 2 + 4, label, "onfill small", "middle")]
            if _DIGIT * len(label) + 2 <= width
            else []
        )
        parts.append(mark(Markup("".join([shape, *shown])), says))
    return parts


def _paths(plan: Plan, passes: Sequence[TimedPass], x_of: Scale, y: float, height: float) -> list[Markup]:
    """Boxes of one color as one path: small where there are thousands."""
    by_class: dict[str, list[str]] = {}
    for one in passes:
        x, width = x_of(one.start), max(0.3, x_of(one.end) - x_of(one.start) - 0.3)
        box = f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h-{number(width)}z"
        by_class.setdefault(_class(plan, one), []).append(box)
    return [tag("path", d="".join(boxes), class_=class_) for class_, boxes in by_class.items()]


def _rows(found: PipelineTimeline) -> list[list[str]]:
    rows = []
    for stage, rank in enumerate(found.ranks):
        busy = sum(one.end - one.start for one in rank)
        rows.append([str(stage), str(len(rank)), format_number(busy), f"{1 - busy / found.seconds:.1%}"])
    return rows
