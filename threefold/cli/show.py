"""`threefold show`: a plan completed, with its grids, groups and pipeline."""

import argparse
from typing import Any

from threefold.cli.command_line.inputs import add_plan_arguments, print_findings, the_plan
from threefold.cli.command_line.out import UsageError, print_json
from threefold.findings import shown
from threefold.layout.degrees import AXES
from threefold.layout.stages import format_stages
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan
from threefold.report.layout import axes_text, grids_text, groups_text, pipeline_text, summary_text
from threefold.report.terminal import cut_lines
from threefold.rules.all import check, errors
from threefold.units import format_many, format_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument("--brief", action="store_true", help="the model, both grids, the pipeline and nothing else")
    parser.add_argument("--rank", type=int, default=0, help="whose groups to print (default 0)")


def run(args: argparse.Namespace) -> int:
    plan = the_plan(args)
    if not 0 <= args.rank < plan.layout.gpus:
        raise UsageError(f"--rank {args.rank} is not one of 0 to {plan.layout.gpus - 1}")
    if not plan.layout.fits_ranks:  # without whole grids there is nothing to draw
        return print_findings(check(plan, notes=False), args.json)
    found = errors(check(plan, notes=False))
    if args.json:
        said = {"summary": cut_lines(_brief_text(plan).splitlines())} | (
            {} if args.brief else _as_json(plan, args.rank)
        )
        print_json({**said, "errors": [one.to_json() for one in found]})
    else:
        print(_brief_text(plan) if args.brief else _as_text(plan, args.rank))
    if found and not args.json:
        print(f"\n{len(found)} errors: see `threefold check`")
    return 1 if found else 0


def _brief_text(plan: Plan) -> str:
    """What somebody asks first, in fifteen lines at most."""
    knobs = [f"{path.partition('.')[2]} {shown(value)}" for path, value in plan.written if path.startswith("knobs.")]
    size = f"{plan.job.global_batch} x {format_tokens(plan.job.seq_len)} tokens a step"
    head = f"plan {plan.hash}: {plan.model_name} on {plan.layout.gpus} x {plan.chip.name} for {plan.target}, {size}"
    chunks = format_stages(plan.chunks)
    pipeline = f"{plan.layout.pipeline_schedule}, {format_many(plan.num_microbatches, 'microbatch')}: {chunks}"
    return "\n".join([head, grids_text(plan), pipeline, *([", ".join(knobs)] if knobs else [])])


def _as_text(plan: Plan, rank: int) -> str:
    parts = [
        dump_plan(plan, complete=True).rstrip(),
        summary_text(plan),
        grids_text(plan),
        axes_text(plan),
        groups_text(plan, rank),
        pipeline_text(plan),
    ]
    return "\n\n".join(parts)


def _as_json(plan: Plan, rank: int) -> dict[str, Any]:
    layout = plan.layout
    return {
        "hash": plan.hash,
        "fields": dict(plan.written),
        "degrees": {axis: layout.degree(axis) for axis in AXES},
        "links": {axis: plan.link(axis).link for axis in AXES},
        "rank": rank,
        "groups": {axis: list(layout.group(axis, rank)) for axis in AXES},
        "stages": format_stages(plan.chunks),
        "num_microbatches": plan.num_microbatches,
    }
