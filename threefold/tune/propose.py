"""Proposes changes of a plan, one variable at a time: the advice that every verb gives for the wall that was measured,
then what a measurement may find that no estimate sees.

The loop calls `propose` with the best plan so far. Variables beyond the catalogue's are recompute sets, microbatches,
kernels and overlaps the other way round, multiprocessors of the dispatcher, and layout neighbors. Each change has the
gain that the cost model predicts. A change that rules or its label refuse, or that is predicted to lose more than the
estimate is unsure, is returned as refused, with the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from threefold.compare.field_groups import differing_fields
from threefold.cost.estimate import estimate, gain, time_band
from threefold.cost.fit import fits
from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.findings import Finding, as_overrides
from threefold.plan.plan import Plan
from threefold.remedies.catalogue import CATALOGUE, TIME_WALLS
from threefold.remedies.evidence import NOTHING_SEEN, Evidence
from threefold.remedies.recompute_sets import every_set
from threefold.remedies.trial import try_change
from threefold.rules.all import advice, errors, judge, promoted
from threefold.rules.base import divisors
from threefold.rules.layout.batch import can_be_priced
from threefold.search.neighbors import sensitivity
from threefold.tune.labels import Label, label_change

MOST_SETS = 3  # sets of recompute that are proposed, the fastest by estimate
MOST_PIECES = 12  # of advice that are proposed first
DISPATCH_SMS = (8, 16, 20, 24, 32)
# Knobs that are tried the other way round: kernels and overlaps whose gain depends on shapes.
FUSIONS = ("expert_fusion", "loss_fusion", "permute_fusion", "grad_accum_fusion", "compile")
OVERLAPS = ("grad_reduce_overlap", "param_gather_overlap", "shared_expert_overlap", "delay_wgrad")

Changes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change of the best plan so far."""

    changes: Mapping[str, Any]
    why: str
    plan: Plan
    label: Label
    predicted_gain: float | None  # of throughput; None where the cost model does not see the change
    changed: tuple[str, ...]  # every field in which the plan differs from the baseline of the tuning

    @property
    def name(self) -> str:
        return as_overrides(self.changes)

    @property
    def variable(self) -> frozenset[str]:
        return frozenset(self.changes)

    def to_json(self) -> dict[str, Any]:
        return {
            "set": dict(self.changes),
            "why": self.why,
            "label": self.label.kind,
            "predicted_gain": self.predicted_gain,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """A change that is not tried."""

    changes: Mapping[str, Any]
    why: str
    label: str
    reason: str

    @property
    def name(self) -> str:
        return as_overrides(self.changes)

    def to_json(self) -> dict[str, Any]:
        return {"set": dict(self.changes), "why": self.why, "label": self.label, "reason": self.reason}


def propose(
    baseline: Plan, best: Plan, wall: str, extra: Sequence[Changes] = (), together: Mapping[str, Any] | None = None
) -> tuple[list[Candidate], list[Refused]]:
    """Changes of `best` in the order in which to try them: those that were certainly better one by one (`together`),
    the user's own, the advice for the wall, then the others by predicted gain. Of changes to the
    same fields the one with the best prediction goes first. A vision-language model's microbatch is swept first."""
    found: list[Candidate] = []
    refused: list[Refused] = []
    seen, before = {best.hash}, judge(best)
    ordered = [(dict(together), "each of these was certainly better on the plan before")] if together else []
    ordered += [(dict(changes), "asked for with --try") for changes in extra]
    if best.is_vlm:  # measured whatever the estimate says: pictures make the microbatch matter more than it knows
        ordered += [(dict(changes), f"{why} with pictures") for changes, why in _microbatches(best)]
    first = list(_advised(best, wall))
    rest = [way for name in (wall, "memory", *TIME_WALLS) for way in _for_wall(best, name)]
    num_first = len(ordered) + len(first)
    later: list[Candidate] = []
    for number, (changes, why) in enumerate([*ordered, *first, *rest, *_for_every_wall(best)]):
        one = _judged(baseline, best, before, changes, why, is_asked=number < len(ordered))
        if isinstance(one, Refused):
            refused.append(one)
        elif one is not None and one.plan.hash not in seen:
            seen.add(one.plan.hash)
            is_first = number < len(ordered) or (number < num_first and (one.predicted_gain or 0.0) >= 0)
            (found if is_first else later).append(one)
    later.sort(key=lambda one: -(one.predicted_gain or 0.0))
    return _best_value_first(found) + _best_value_first(later), refused


def _best_value_first(found: list[Candidate]) -> list[Candidate]:
    """Keep the order of variables; of one variable the best prediction goes first, its others behind all."""
    by_variable: dict[frozenset[str], list[Candidate]] = {}
    for one in found:
        by_variable.setdefault(one.variable, []).append(one)
    ranked = [sorted(ones, key=lambda one: -(one.predicted_gain or 0.0)) for ones in by_variable.values()]
    longest = max(map(len, ranked), default=0)
    return [ones[place] for place in range(longest) for ones in ranked if place < len(ones)]


def _judged(
    baseline: Plan, best: Plan, before: list[Finding], changes: Changes, why: str, is_asked: bool
) -> Candidate | Refused | None:
    """The change as a candidate, or why it is refused; None where it changes nothing. `before`: findings of `best`."""
    trial = try_change(best, changes, judge)
    stated, other = dict(trial.changes), trial.plan
    if not stated or (other is not None and other.hash == best.hash):
        return None
    if other is None:
        return Refused(stated, why, "none", trial.reason)
    label = label_change(baseline, other)
    if not label.can_be_tried:
        return Refused(stated, why, label.kind, "; ".join(label.reasons))
    after = list(trial.findings)
    known = {finding.rule for finding in errors(promoted(before))}
    broken = [one for one in errors(promoted(after)) if one.rule not in known]
    if broken:
        return Refused(stated, why, label.kind, f"{broken[0].rule}: {broken[0].problem}")
    idle = [one for one in (*before, *after) if one.rule == "engine-has-a-choice" and one.at in stated]
    if {one.at for one in idle} == set(stated):
        return Refused(stated, why, label.kind, idle[0].problem)
    wide = [one for one in after if one.rule == "etp-only-when-ep-insufficient"]
    if wide and wide[0].rule not in {one.rule for one in before} and not is_asked:
        return Refused(stated, why, label.kind, f"{wide[0].rule}: {wide[0].problem}")
    predicted = _predicted(best, other)
    if predicted is not None and predicted < -time_band(best) and not is_asked:
        return Refused(stated, why, label.kind, f"predicted to be {-predicted:.0%} slower")
    changed = tuple(each.path for each in differing_fields(baseline, other))
    return Candidate(stated, why, other, label, predicted, changed)


def _predicted(best: Plan, other: Plan) -> float | None:
    if not (can_be_priced(best) and can_be_priced(other) and other.num_microbatches):
        return None
    found = round(gain(best, other), 4)
    return found or None  # no term of the estimate depends on what changes nothing in it


def _advised(plan: Plan, wall: str) -> Iterator[tuple[Changes, str]]:
    """The advice for the wall that can make a step shorter: what has no price is not seen in a few steps."""
    evidence = Evidence(wall=wall) if wall in TIME_WALLS else NOTHING_SEEN
    for piece in advice(plan, evidence, MOST_PIECES):
        if piece.changes and piece.gain is not None and (piece.wall != "memory" or piece.gain > 0):
            yield piece.changes, piece.remedy.what


def _for_wall(plan: Plan, wall: str) -> Iterator[tuple[Changes, str]]:
    """Every way of the wall's remedies, whatever is predicted of it; for memory sets of recompute."""
    if wall in ("memory", "unknown"):
        yield from _recompute_sets(plan)
        return
    is_cpu = plan.chip.architecture == "cpu"
    for remedy in CATALOGUE:
        if wall in remedy.answers and remedy.ways and remedy.is_priced and (remedy.on_cpu or not is_cpu):
            yield from ((dict(changes), remedy.what) for changes in remedy.ways(plan))
    if wall == "host":
        yield from _microbatches(plan)


def _recompute_sets(plan: Plan) -> Iterator[tuple[Changes, str]]:
    """The fastest sets by estimate that fit, other than the plan's own."""
    if not can_be_priced(plan):
        return
    priced = []
    for names in every_set(plan):
        other = replace(plan, knobs=replace(plan.knobs, recompute=names))
        if names != plan.knobs.recompute and fits(other):
            priced.append((step_time(other, rates_of(plan)).step_seconds, len(names), names))
    for _, _, names in sorted(priced)[:MOST_SETS]:
        units = {"knobs.recompute_method": None, "knobs.recompute_layers": None}
        yield {"knobs.recompute": list(names) or None, **units}, "recompute as little as memory allows"


def _microbatches(plan: Plan) -> Iterator[tuple[Changes, str]]:
    sequences = plan.job.global_batch // plan.layout.dp
    for size in divisors(sequences) if plan.layout.dp * sequences == plan.job.global_batch else []:
        now = plan.job.micro_batch
        if size != now and max(size, now) % min(size, now) == 0 and (max(size, now) // min(size, now)) in (2, 4, 8):
            yield {"job.micro_batch": size}, "sweep of the microbatch"


def _for_every_wall(plan: Plan) -> Iterator[tuple[Changes, str]]:
    knobs = plan.knobs
    for name in FUSIONS:
        yield {f"knobs.{name}": not getattr(knobs, name)}, "kernels whose gain depends on shapes"
    if plan.layout.gpus > 1:
        for name in OVERLAPS:
            yield {f"knobs.{name}": not getattr(knobs, name)}, "overlap whose gain depends on shapes"
    if knobs.graphs:
        for scope in knobs.graphs:
            yield {"knobs.graphs": [s for s in knobs.graphs if s != scope] or None}, "fewer graph scopes"
        yield {"knobs.graphs": ["full_iteration"]}, "one graph of a whole iteration, as narrower scopes are stable"
    if knobs.dispatcher in ("deepep", "hybridep"):
        for count in DISPATCH_SMS:
            yield {"knobs.dispatch_sms": count}, "multiprocessors of the dispatcher"
    if can_be_priced(plan) and plan.layout.gpus > 1:
        for trial in sensitivity(plan, estimate(plan)):
            if trial.effect is not None and "job.micro_batch" not in trial.changes:
                yield dict(trial.changes), "a neighbor of the layout"
