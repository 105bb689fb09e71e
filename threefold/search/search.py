"""`search`: a draft in; ranked plans with their reasons out, or the one finding that says why there is none."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from threefold.cost.estimate import Estimate
from threefold.fields import MAX_RANKS
from threefold.findings import Finding, FindingsError
from threefold.notebook import ShownAsTable
from threefold.plan.plan import Plan
from threefold.remedies.advise import Advice
from threefold.remedies.recompute_sets import goes_with_mode
from threefold.rules.all import advice, check, errors, judge, promoted
from threefold.search.explain import Reasons, reasons
from threefold.search.explore import Found, Progress, explore
from threefold.search.impossible import finding
from threefold.search.knobs import precisions
from threefold.search.legal import untrained
from threefold.search.neighbors import Comparison, NextBetter, Trial, comparisons, next_better, sensitivity
from threefold.search.price import Priced, Pricer
from threefold.search.rank import LITTLE_ROOM, Group, complexity, group_of, grouped, why_after
from threefold.search.refine import heeded, rebuilt, refined
from threefold.search.space import MOST_RELAXED, Space, read_draft
from threefold.spec.chips import ChipSpec
from threefold.units import format_bytes

FINALISTS = 2  # more than the candidates asked for, that are finished and ranked


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan of the answer."""

    plan: Plan
    estimate: Estimate
    reasons: Reasons
    complexity: int
    after: str = ""  # why it stands after the first

    @property
    def why(self) -> tuple[str, ...]:
        return self.reasons.all

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What `check` says of it, with fixes that were tried: for those that are shown only."""
        return tuple(check(self.plan, notes=False))

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": dict(self.plan.written),
            "hash": self.plan.hash,
            "estimate": self.estimate.to_json(),
            "why": list(self.why),
            "complexity": self.complexity,
            "after": self.after,
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult(ShownAsTable):
    """The answer: candidates, best first, or a finding."""

    candidates: tuple[Candidate, ...]
    searched: int  # points of the space that were considered
    priced: int  # of these, estimated in full; bounds excluded the rest
    feasible: int  # of these, within rules and memory
    seconds: float
    finding: Finding | None = None
    next_better: NextBetter | None = None
    sensitivity: tuple[Trial, ...] = ()
    retune: tuple[Advice, ...] = ()  # of the best plan
    comparisons: tuple[Comparison, ...] = ()  # the next A/Bs: candidates that the best plan does not have
    group: Group | None = None  # what the estimate cannot tell from the fastest

    @property
    def best(self) -> Plan:
        """The plan of the first candidate; raises the finding where there is none."""
        if not self.candidates:
            raise FindingsError([self.finding] if self.finding else [])
        return self.candidates[0].plan

    def summary(self) -> str:
        if not self.candidates:
            return f"no plan: {self.finding.problem}" if self.finding else "no plan"
        best = self.candidates[0]
        return f"{len(self.candidates)} candidates; best {best.plan.summary()}, {best.estimate.summary()}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The candidates, best first."""
        rows = []
        for one in self.candidates:
            degrees = ", ".join(f"{axis} {one.plan.layout.degree(axis)}" for axis in ("tp", "cp", "pp", "ep", "dp"))
            tflops, size = one.estimate.model_tflops_per_gpu, one.estimate.memory.device_bytes
            rows.append([degrees, one.plan.knobs.precision, f"{tflops:.0f}", format_bytes(size), one.estimate.wall])
        return ["layout", "precision", "TFLOP/s a GPU", "memory", "wall"], rows

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
        if self.group:
            said["group"] = self.group.to_json()
        if self.candidates:
            said["sensitivity"] = [_trial_json(one) for one in self.sensitivity]
            said["retune"] = [one.to_json() for one in self.retune]
            said["comparisons"] = [_comparison_json(one) for one in self.comparisons]
        return said


def search(
    draft_fields: Mapping[str, Any],
    top: int = 5,
    progress: Progress | None = None,
    measured: ChipSpec | None = None,
) -> SearchResult:
    """Fill in what a draft leaves open.

    `draft_fields` are plan fields; absent or "auto" means free for layout.* and knobs.*, and for the batch and
    the microbatch. With cluster.gpus = "auto" the smallest number of whole nodes that works is taken.
    `measured` are facts and rates of a chip file in place of the shipped ones. Raises FindingsError where the fixed
    fields are no plan.
    """
    start = time.perf_counter()
    space = read_draft(draft_fields, measured)
    if refused := untrained(space.base):
        return SearchResult((), 0, 0, 0, time.perf_counter() - start, finding=finding(space, refused))
    if not _can_be_climbed(space):
        return SearchResult((), 0, 0, 0, time.perf_counter() - start, finding=finding(space))
    pricer, found = _explore_first(space, top, progress)
    space = pricer.space
    if not found.best:
        said = finding(space)
        return SearchResult((), found.searched, pricer.num_time, 0, time.perf_counter() - start, finding=said)
    everyone = list(found.best.values())
    finished = [refined(space, pricer, one) for one in _finalists(everyone, top)]
    order, size = grouped(finished)
    bad = [one for one in order[: top + FINALISTS] if _refusals(one.plan)]
    size -= sum(one in bad for one in order[:size])
    order = [one for one in order if one not in bad]
    if not order:
        said = finding(space, _refusals(bad[0].plan))
        return SearchResult((), found.searched, pricer.num_time, 0, time.perf_counter() - start, finding=said)
    size = max(1, size)
    group = group_of(order, size, [*order, *everyone])
    group = replace(group, size=max(size, grouped(everyone)[1]))
    chosen = _shown(order, size, top)
    candidates = _candidates(space, chosen)
    best = candidates[0]
    better = next_better(pricer, found.short, chosen[0])
    return SearchResult(
        candidates=candidates,
        searched=found.searched,
        priced=pricer.num_time,
        feasible=found.feasible,
        seconds=time.perf_counter() - start,
        next_better=better,
        sensitivity=sensitivity(best.plan, best.estimate),
        retune=advice(best.plan),
        comparisons=comparisons(best.plan, best.estimate),
        group=group,
    )


def _finalists(found: list[Priced], top: int) -> list[Priced]:
    """The first of the order, and the fastest."""
    order, _ = grouped(found)
    fastest = max(found, key=lambda one: one.sure)
    return list({id(one): one for one in [*order[: top + FINALISTS], fastest]}.values())


def _shown(order: list[Priced], size: int, top: int) -> list[Priced]:
    """The first of the order; the fastest of the first group stands last where it would be left out."""
    shown, fastest = order[:top], min(order[:size], key=lambda one: one.step_seconds)
    return shown if top == 1 or fastest in shown else [*shown[:-1], fastest]


def _refusals(plan: Plan) -> list[Finding]:
    return errors(promoted(judge(plan), plan.target))


def _can_be_climbed(space: Space) -> bool:
    """Whether some recompute goes with the fixed knobs; where none does, no number of GPUs makes a plan."""
    sets = [(), ("full",)] if space.free("knobs.recompute") else [space.base.knobs.recompute]
    return any(goes_with_mode(space.base, names) for names in sets)


def _explore_first(space: Space, top: int, progress: Progress | None) -> tuple[Pricer, Found]:
    """Explore with room left at the top of memory's band, then without room, then past the preferred degrees, then on
    more GPUs where that is free; below sixteen bits where none of these gives a plan.

    For Megatron Bridge, whose published runs fit although predicted to be fuller, the middle of the band comes next.
    """
    spaces = [space]
    if space.auto_gpus:
        node = space.base.cluster.node
        counts = [node * 2**i for i in range(16) if node * 2**i <= MAX_RANKS]
        spaces = [read_draft({**space.given, "cluster.gpus": gpus}, space.base.cluster.measured) for gpus in counts]
    bands = [(True, LITTLE_ROOM), (True, 0.0), *([(False, 0.0)] if space.base.target != "threefold" else [])]
    for low, space, relaxed, (at_top, room) in product((False, True), spaces, range(MOST_RELAXED + 1), bands):
        tried = replace(space, low_precision=low, relaxed=relaxed)
        if precisions(tried):
            pricer = Pricer(tried, at_top, room)
            found = explore(pricer, top, progress)
            if found.best:
                break
    return pricer, found


def _candidates(space: Space, chosen: list[Priced]) -> tuple[Candidate, ...]:
    made: list[Candidate] = []
    for one in chosen:
        plan, priced = heeded(space, rebuilt(space, one.plan))
        said = reasons(plan, priced, made[0].estimate if made else None, space.given)
        after = why_after(one, chosen[0]) if made else ""
        made.append(Candidate(plan, priced, said, complexity(plan), after))
    return tuple(made)


def _trial_json(one: Trial) -> dict[str, Any]:
    return {"changes": dict(one.changes), "throughput_change": one.effect, "reason": one.reason}


def _comparison_json(one: Comparison) -> dict[str, Any]:
    return {**_trial_json(one.trial), "band": one.trial.band, **asdict(one.candidate)}


def _next_json(one: NextBetter) -> dict[str, Any]:
    return {
        "layout": {axis: one.plan.layout.degree(axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "etp")},
        "throughput_change": one.effect,
        "need_bytes": round(one.need_bytes),
        "have_bytes": one.have_bytes,
        "stage": one.stage,
        "cures": [_trial_json(cure) for cure in one.cures],
    }
