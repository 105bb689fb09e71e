"""One observed step of a tiny plan, on one rank or on forked ranks, and the report about it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tiny_runs import tiny_plan

from threefold.engine.build import Parts, build
from threefold.engine.dist.mesh import Mesh
from threefold.engine.effects.effect import Effect
from threefold.engine.effects.recorder import RankEvidence, RunEffects, RunReport
from threefold.engine.model_options import Options
from threefold.engine.step import train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan

Change = Callable[[Parts], Parts]


def run_observed(
    rank: int, plan: Plan, change: Change | None = None, options: Options | None = None, steps_before: int = 0
) -> RankEvidence:
    """Observe one step as a rank of the plan's layout, with other parts or options where they are given."""
    mesh = Mesh(plan.layout, rank)
    parts = build(plan, mesh, options=options, with_data=False)
    parts = change(parts) if change else parts
    observer = RunEffects(replace(plan, job=replace(plan.job, steps=steps_before + 1)), parts, rank, 0, 1)
    observer.observed_step = steps_before + 1
    for step in range(steps_before + 1):
        batches = [synthetic_batch(plan, step, m, mesh.coordinate("dp")) for m in range(plan.num_microbatches)]
        with observer.step(step + 1):
            train_step(parts, batches, 1e-3, plan.job)
    return observer.collect()


def observe(fields: dict[str, Any], change: Change | None = None, **more: Any) -> RunReport:
    """The report of one step in which the plan runs on as many ranks as it has."""
    plan = tiny_plan(fields)
    if plan.layout.gpus == 1:
        return RunReport(plan, [run_observed(0, plan, change, **more)])
    return RunReport(plan, run_ranks(plan.layout.gpus, run_observed, plan, change))


def effect_of(report: RunReport, knob: str) -> Effect:
    (found,) = [effect for effect in report.effects if effect.knob == knob]
    return found
