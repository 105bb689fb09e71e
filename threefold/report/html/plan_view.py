"""A plan with everything that pages say about it: findings, estimate, traffic, and the timeline of its pipeline."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threefold.cost.estimate import Estimate, estimate
from threefold.cost.time.pipeline_timeline import PipelineTimeline, pipeline_timeline
from threefold.cost.traffic.by_stack import traffic
from threefold.cost.traffic.transfers import Transfer
from threefold.findings import Finding, in_order
from threefold.plan.plan import Plan
from threefold.rules.all import blockers, errors, judge, with_fixes

if TYPE_CHECKING:  # numpy comes with it
    from threefold.cost.time.simulation import Simulation


@dataclass(frozen=True, slots=True)
class PlanView:
    """What is said and predicted about a plan. There is no estimate where rules refuse the plan: it would mislead."""

    plan: Plan
    findings: Sequence[Finding] = ()
    estimate: Estimate | None = None
    timeline: PipelineTimeline | None = None
    traffic: Sequence[Transfer] = ()
    simulated: "Simulation | None" = None
    jitter: float = 0.0  # of the simulation's passes


def view_plan(plan: Plan, before: Iterable[Finding] = ()) -> PlanView:
    """Judge and estimate a plan on its chip. `before` are findings of reading it."""
    read = list(before)
    judged = judge(plan, notes=not errors(read))
    found = in_order(with_fixes(plan, [*read, *judged]))
    if errors(read) or blockers(judged):
        return PlanView(plan, found)
    guess = estimate(plan)
    return PlanView(plan, found, guess, pipeline_timeline(plan, guess.time), traffic(plan))
