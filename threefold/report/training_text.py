"""What a whole training takes, as text: one cluster in detail, and the same training on clusters of other sizes."""

from collections.abc import Sequence
from typing import Any

from threefold.cost.training_run.training_run import TrainingRun
from threefold.plan.plan import Plan
from threefold.report.terminal import cut_lines, table
from threefold.search.sweep import Point
from threefold.spec.clusters.operations import SOURCES
from threefold.units import format_count, format_number

Curve = Sequence[tuple[Point, TrainingRun | None]]
LARGEST_USUAL = 100_000


def usual_sizes(plan: Plan) -> list[int]:
    """The plan's own size and its doublings and halvings, from the smallest that its layout allows to 100,000 GPUs."""
    sizes, floor = {plan.layout.gpus}, plan.layout.min_gpus
    size = plan.layout.gpus
    while size % 2 == 0 and size // 2 >= floor:
        size //= 2
        sizes.add(size)
    size = plan.layout.gpus
    while size * 2 <= LARGEST_USUAL:
        size *= 2
        sizes.add(size)
    largest = LARGEST_USUAL // floor * floor
    return sorted(sizes | ({largest} if largest else set()))


def training_text(plan: Plan, found: TrainingRun, curve: Curve = ()) -> str:
    """All of it: what it takes, what was assumed, and the curve where one was asked for."""
    head = (
        f"estimated for {plan.target}, {found.level}: {plan.model_name}, {format_count(found.tokens)} tokens on "
        f"{found.gpus} x {plan.chip.name}, {plan.knobs.precision}"
    )
    parts = [head, table(*found.table()), _assumed(found)]
    return "\n\n".join([*parts, *([curve_text(curve)] if curve else [])])


def _assumed(found: TrainingRun) -> str:
    rows = []
    for name, source in SOURCES.items():
        value = found.spare_nodes if name == "spare_nodes" else getattr(found.operations, name)
        rows.append([name, format_number(value), "given" if name in found.replaced else source])
    return table(["assumed", "value", "source"], rows)


def curve_text(curve: Curve) -> str:
    """One row for each size. Where the rules refuse the plan, the row says which."""
    rows = []
    for point, run in curve:
        row = [str(point.value), str(point.plan.job.global_batch)]
        if run is None or not point.is_right:
            rows.append([*row, *["-"] * 6, point.verdict])
            continue
        energy = "-" if run.energy_mwh is None else run.rounded(run.energy_mwh)
        cost = "-" if run.cost is None else run.rounded(run.cost)
        figures = [run.rounded(run.days), run.rounded(run.paid_gpu_hours), f"{run.goodput.useful:.1%}"]
        rows.append([*row, *figures, str(run.save_steps), energy, cost, point.verdict])
    return table(["GPUs", "batch", "days", "GPU-hours", "goodput", "save steps", "MWh", "cost", ""], rows)


def point_json(point: Point, run: TrainingRun | None) -> dict[str, Any]:
    return {
        "gpus": point.value,
        "global_batch": point.plan.job.global_batch,
        "verdict": point.verdict,
        "training": run.to_json() if run else None,
    }


def training_summary(plan: Plan, found: TrainingRun) -> list[str]:
    return cut_lines(training_text(plan, found).splitlines())
