"""`search`: a draft in; ranked plans with their reasons out, or the one finding that says why there is none."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from threefold.cost.estimate import Estimate, estimate
from threefold.fields import MAX_RANKS
from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors
from threefold.search.explain import Reasons, reasons
from threefold.search.explore import Found, Progress, explore
from threefold.search.impossible import finding
from threefold.search.neighbours import NextBetter, Trial, next_better, retune, sensitivity
from threefold.search.price import Priced, Pricer
from threefold.search.rank import complexity, pareto, ranked
from threefold.search.refine import rebuilt, refined
from threefold.search.space import MOST_RELAXED, Space, read_draft

HEADROOM = 0.05  # of the memory that a plan should leave free: what the estimate may be off by
FINALISTS = 4  # times the candidates asked for, that are finished and ranked


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan of the answer."""

    plan: Plan
    estimate: Estimate
    reasons: Reasons
    pareto: bool  # no other candidate is faster, roomier and simpler at once
    complexity: int

    @property
    def why(self) -> tuple[str, ...]:
        return self.reasons.all

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": dict(self.plan.written),
            "hash": self.plan.hash,
            "estimate": self.estimate.to_json(),
            "why": list(self.why),
            "pareto": self.pareto,
            "complexity": self.complexity,
        }


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer: candidates, best first, or a finding."""

    candidates: tuple[Candidate, ...]
    searched: int  # points of the space that were considered
    priced: int  # of these, estimated in full; bounds excluded the rest
    feasible: int  # of these, within rules and memory
    seconds: float
    finding: Finding | None = None
    next_better: NextBetter | None = None
    sensitivity: tuple[Trial, ...] = ()
    retune: tuple[Trial, ...] = ()

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "candidates": [one.to_json() for one in self.candidates],
            "searched": self.searched,
            "priced": self.priced,
            "feasible": self.feasible,
            "seconds": self.seconds,
        }
        if self.finding:
            said["finding"] = self.finding.to_json()
        if self.next_better:
            said["next_better"] = _next_json(self.next_better)
        if self.candidates:
            said["sensitivity"] = [_trial_json(one) for one in self.sensitivity]
            said["retune"] = [_trial_json(one) for one in self.retune]
        return said


def search(draft_fields: Mapping[str, Any], top: int = 5, progress: Progress | None = None) -> SearchResult:
    """Fill in what a draft leaves open.

    `draft_fields` are plan fields; absent or "auto" means free for layout.* and knobs.*, and for the batch and
    the microbatch. With cluster.gpus = "auto" the smallest number of whole nodes that works is taken. Raises
    FindingsError where the fixed fields are no plan.
    """
    start = time.perf_counter()
    pricer, found = _explore_first(draft_fields, top, progress)
    space = pricer.space
    if not found.best:
        said = finding(space)
        return SearchResult((), found.searched, pricer.num_time, 0, time.perf_counter() - start, finding=said)
    order = sorted(found.best.values(), key=lambda one: -one.sure)
    finished = [refined(space, pricer, one) for one in order[: FINALISTS * top]]
    everyone = [*finished, *order[FINALISTS * top :]]
    front = {id(everyone[place]) for place in pareto(everyone)}
    band = pricer.slow_end(order[0].plan.layout, order[0].plan.knobs) - 1
    chosen = [one for one in ranked(finished, band) if not errors(check(one.plan))][:top]
    candidates = _candidates(space, chosen, front)
    best = candidates[0]
    better = next_better(pricer, found.short, chosen[0])
    steps, trials = sensitivity(best.plan, best.estimate), retune(best.plan, best.estimate)
    return SearchResult(
        candidates=candidates,
        searched=found.searched,
        priced=pricer.num_time,
        feasible=found.feasible,
        seconds=time.perf_counter() - start,
        next_better=better,
        sensitivity=steps,
        retune=trials,
    )


def _explore_first(fields: Mapping[str, Any], top: int, progress: Progress | None) -> tuple[Pricer, Found]:
    """Explore with headroom, then to the brim, then past the preferred degrees; more GPUs where that is free."""
    space = read_draft(fields)
    counts = [space.gpus]
    if space.auto_gpus:
        node = space.base.cluster.node
        counts = [node * 2**i for i in range(16) if node * 2**i <= MAX_RANKS]
    for gpus in counts:
        if gpus != space.gpus:
            space = read_draft({**space.given, "cluster.gpus": gpus})
        for relaxed in range(MOST_RELAXED + 1):
            pricer = Pricer(replace(space, relaxed=relaxed))
            for pricer.reserve in (HEADROOM, 0.0):
                found = explore(pricer, top, progress)
                if found.best:
                    return pricer, found
    return pricer, found


def _candidates(space: Space, chosen: list[Priced], front: set[int]) -> tuple[Candidate, ...]:
    made: list[Candidate] = []
    for one in chosen:
        plan = rebuilt(space, one.plan)
        priced = estimate(plan)
        said = reasons(plan, priced, made[0].estimate if made else None)
        made.append(Candidate(plan, priced, said, id(one) in front, complexity(plan)))
    return tuple(made)


def _trial_json(one: Trial) -> dict[str, Any]:
    return {"changes": dict(one.changes), "throughput_change": one.effect, "reason": one.reason}


def _next_json(one: NextBetter) -> dict[str, Any]:
    return {
        "layout": {axis: one.plan.layout.degree(axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp")},
        "throughput_change": one.effect,
        "need_bytes": round(one.need_bytes),
        "have_bytes": one.have_bytes,
        "stage": one.stage,
        "cures": [_trial_json(cure) for cure in one.cures],
    }
