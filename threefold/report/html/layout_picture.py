"""The two grids of a layout over the same ranks: attention above, experts below, nodes and domains between them.

A column is a rank of one pipeline stage, a row an axis; neighbors with one coordinate form a block. `page.js` lights
up the groups of the rank under the pointer. Large layouts are drawn in part: the caption says how often it repeats.
"""

import math
from collections.abc import Iterator
from itertools import groupby

from threefold.cost.stage_contents import stage_contents
from threefold.layout.degrees import DENSE_AXES, EXPERT_AXES
from threefold.plan.plan import Plan
from threefold.report.html.markup import Attribute, Markup, join, tag
from threefold.report.html.palette import AXIS_CLASSES, shaded
from threefold.report.html.svg import WIDTH, drawing, figure, fits, line, mark, numbers_table, rect, text
from threefold.report.layout import AXIS_NAMES, grids_text
from threefold.units import format_many

MOST_RANKS = 64  # columns
MOST_STAGES = 32
_LEFT, _ROW, _GAP = 150.0, 24.0, 3.0
_DIGIT = 5.2  # width of a digit of the smallest labels
_LINKS = {"none": "", "domain": "NVLink", "network": "network"}
_CPU_LINKS = {"none": "", "domain": "this machine", "network": "network"}


def layout_figure(plan: Plan) -> Markup:
    """The picture of a layout whose degrees fit its ranks."""
    layout = plan.layout
    ranks_in_stage = layout.gpus // layout.pp
    num_shown = num_drawn_ranks(plan)
    cell = min(46.0, (WIDTH - _LEFT - 4) / num_shown)
    y = 4.0
    parts: list[Markup] = []
    if layout.pp > 1:
        parts.append(_stages(plan, y))
        y += 58
    parts.append(text(0, y + 12, "attention", "strong"))
    y += 20
    for axis in DENSE_AXES[1:]:
        parts.append(_axis_row(plan, axis, num_shown, cell, y))
        y += _ROW
    parts.append(_nodes(plan, num_shown, cell, y + 4))
    y += 58 if plan.cluster.domain_ranks > plan.cluster.node else 38
    for axis in EXPERT_AXES[1:]:
        parts.append(_axis_row(plan, axis, num_shown, cell, y))
        y += _ROW
    parts.append(text(0, y + 14, "experts", "strong"))
    label = grids_text(plan).replace("\n", "; ")
    return figure(
        "Two grids folded over the same ranks",
        _note(plan, num_shown, ranks_in_stage),
        drawing(y + 22, label, tag("g", *parts, class_="grids")),
        numbers=numbers_table(["axis", "parallel", "degree", "stride", "link", "share a domain"], _rows(plan)),
    )


def num_drawn_ranks(plan: Plan) -> int:
    """Ranks of a stage that are drawn: all, else whole repetitions of the fold, else the first ones."""
    layout = plan.layout
    in_stage = layout.gpus // layout.pp
    if in_stage <= MOST_RANKS:
        return in_stage
    fold = math.lcm(layout.tp * layout.cp, layout.ep * layout.etp)
    return MOST_RANKS // fold * fold if fold <= MOST_RANKS else MOST_RANKS


def _note(plan: Plan, num_shown: int, in_stage: int) -> str:
    said = "A column is a rank. Point at one, or use the arrow keys, to see the groups that it belongs to. "
    if num_shown == in_stage:
        which = "Stage 0 is drawn" if plan.layout.pp > 1 else "All ranks are drawn"
        return f"{said}{which}: {format_many(in_stage, 'rank')}."
    drawn = f"The first {num_shown} of {in_stage} ranks of a stage are drawn"
    fold = math.lcm(plan.layout.tp * plan.layout.cp, plan.layout.ep * plan.layout.etp)
    if fold <= num_shown:
        return (
            f"{said}{drawn}; the fold repeats every {format_many(fold, 'rank')}, {in_stage // fold} times in a stage."
        )
    return f"{said}{drawn}; the fold spans {fold} of them."


def _rows(plan: Plan) -> list[list[str]]:
    rows = []
    for axis in (*DENSE_AXES, *EXPERT_AXES[1:]):
        link = plan.link(axis)
        shared = "" if link.degree == 1 else f"{link.in_domain} of {link.degree}"
        rows.append([axis.upper(), AXIS_NAMES[axis], str(link.degree), str(link.stride), link.link, shared])
    return rows


def _axis_row(plan: Plan, axis: str, num_shown: int, cell: float, y: float) -> Markup:
    layout, link = plan.layout, plan.link(axis)
    links = _CPU_LINKS if plan.chip.architecture == "cpu" else _LINKS
    name = f"{axis.upper()} {link.degree}"
    parts = [text(0, y + 16, name, "strong" if link.degree > 1 else "tick")]
    parts.append(text(60, y + 16, links[link.link], "tick"))
    group: dict[str, Attribute] = {"class_": "axis", "data_axis": axis}
    group |= {"data_stride": link.stride, "data_degree": link.degree}
    if link.degree == 1:
        whole = rect(_LEFT, y + 9, num_shown * cell - _GAP, 5, "flat")
        return tag("g", *parts, mark(whole, f"{name}: every rank has the whole"), **group)
    x, cells = _LEFT, []
    for coordinate, run in groupby(range(num_shown), key=lambda rank: layout.coordinate(axis, rank)):
        ranks = list(run)
        width = len(ranks) * cell
        for rank in ranks:
            last = rank == ranks[-1]
            class_ = shaded(AXIS_CLASSES[axis], coordinate)
            shape = rect(_LEFT + rank * cell, y + 2, cell - (_GAP if last else -0.3), _ROW - 4, class_, data_r=rank)
            cells.append(shape)
        label = f"{axis}{coordinate}" if fits(f"{axis}{coordinate}", width - _GAP) else str(coordinate)
        if _DIGIT * len(label) <= width - 1.5:
            size = "onfill" if fits(label, width - _GAP + 4) else "onfill tiny"
            cells.append(text(x + (width - _GAP) / 2, y + 16, label, size, "middle"))
        x += width
    return tag("g", *parts, *cells, **group)


def _nodes(plan: Plan, num_shown: int, cell: float, y: float) -> Markup:
    """The ranks with their numbers, boxed by node, and the domains below."""
    node, domain = plan.cluster.node, plan.cluster.domain_ranks
    word = "machine" if plan.chip.architecture == "cpu" else "node"
    parts = [text(0, y + 20, "rank", "strong"), text(60, y + 20, f"{min(node, plan.layout.gpus)} a {word}", "tick")]
    for first in range(0, num_shown, node):
        count = min(node, num_shown - first)
        parts.append(rect(_LEFT + first * cell - 1, y + 3, count * cell - 1, 26, "box"))
    for rank in range(num_shown):
        coordinates = ", ".join(f"{axis} {place}" for axis, place in plan.layout.coordinates(rank).items())
        says = f"rank {rank} on {word} {rank // node}: {coordinates}"
        shape = rect(_LEFT + rank * cell + 1, y + 6, cell - _GAP - 2, 20, "rank")
        label = str(rank)
        size = "ranknumber" if cell >= 24 else "ranknumber tiny"
        shown = [text(_LEFT + rank * cell + (cell - _GAP) / 2, y + 20, label, size, "middle")]
        shown = shown if _DIGIT * len(label) <= cell - 1.5 else []
        parts.append(mark(join([shape, *shown]), says, data_rank=rank))
    if domain > node:
        parts += _domains(domain, num_shown, cell, y + 34)
    return join(parts)


def _domains(domain: int, num_shown: int, cell: float, y: float) -> Iterator[Markup]:
    for first in range(0, num_shown, domain):
        end = min(first + domain, num_shown)
        left, right = _LEFT + first * cell, _LEFT + end * cell - _GAP
        yield line(left, y, right, y, "rule")
        said = f"one NVLink domain of {domain}" + ("" if end - first == domain else f", {end - first} drawn")
        yield text((left + right) / 2, y + 13, said, "tick", "middle")


def _stages(plan: Plan, y: float) -> Markup:
    """The pipeline stages in a row with their layers; the first one is the one drawn below."""
    layout = plan.layout
    held = layers_by_stage(plan)
    shown = list(range(layout.pp)) if layout.pp <= MOST_STAGES else [*range(MOST_STAGES - 1), layout.pp - 1]
    width = (WIDTH - _LEFT - 4) / len(shown)
    in_stage = layout.gpus // layout.pp
    parts = [text(0, y + 20, f"PP {layout.pp}", "strong"), text(60, y + 20, f"{in_stage} ranks each", "tick")]
    for place, stage in enumerate(shown):
        x = _LEFT + place * width
        says = f"stage {stage}: ranks {stage * in_stage} to {(stage + 1) * in_stage - 1}, {held[stage]}"
        parts.append(mark(rect(x, y + 2, width - _GAP, 28, "stage first" if stage == 0 else "stage"), says))
        label = f"stage {stage}" if fits(f"stage {stage}", width) else str(stage)
        parts.append(text(x + (width - _GAP) / 2, y + 20, label, "ranknumber", "middle"))
    parts.append(line(_LEFT, y + 32, _LEFT, y + 44, "rule"))
    parts.append(text(_LEFT + 8, y + 46, "stage 0, rank by rank", "tick"))
    return join(parts)


def layers_by_stage(plan: Plan) -> list[str]:
    """What each stage holds, in words: `1 chunk: embedding, 8 layers`."""
    if sum(len(chunk.layers) for chunk in plan.chunks) != plan.model.num_layers:
        return ["with layers that are not those of the model: see the findings"] * plan.layout.pp
    found = []
    for held in stage_contents(plan):
        parts = ["embedding"] if held.embedding else []
        parts.append(format_many(len(held.layers), "layer"))
        parts += [format_many(held.mtp, "MTP depth")] if held.mtp else []
        parts += ["loss"] if held.loss else []
        found.append(f"{format_many(len(held.chunks), 'chunk')}: {', '.join(parts)}")
    return found
