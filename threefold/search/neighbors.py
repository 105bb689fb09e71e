"""Around the chosen plan: one step in each degree, the next A/Bs, and the faster plan that does not fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from threefold.cost.estimate import Estimate, estimate, fit_band, gain
from threefold.cost.format_support import can_split_masters, low_precisions
from threefold.cost.memory.by_stack import fullest_bytes
from threefold.plan.plan import Plan
from threefold.remedies.graph_scopes import wider_graphs
from threefold.remedies.trial import try_change
from threefold.search.legal import faults
from threefold.search.price import Priced, Pricer
from threefold.spec.candidates import GRAPH_CANDIDATES, Candidate, dispatcher_candidates, precision_candidates
from threefold.spec.chips import CHIPS
from threefold.units import format_bytes

STEPS = ("layout.tp", "layout.cp", "layout.pp", "layout.vpp", "layout.ep", "layout.etp", "job.micro_batch")
FASTER = 0.01  # predicted, from which a plan counts as the next better one
MOST_SHORT = 12  # plans that do not fit, looked at from the smallest lack of memory up


@dataclass(frozen=True, slots=True)
class Trial:
    """The chosen plan with a few fields changed: what it would do, or why it cannot be."""

    changes: Mapping[str, Any]
    effect: float | None  # change of throughput, as a fraction
    reason: str = ""  # why there is none
    band: float | None = None  # how sure the step times are, where an A/B is to decide


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate for the dispatcher, the precision or graphs, tried in place of the plan's own: the next A/B."""

    trial: Trial
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class NextBetter:
    """A faster plan that does not fit, and what would make it fit."""

    plan: Plan
    effect: float
    need_bytes: float
    have_bytes: float
    stage: int
    cures: tuple[Trial, ...]


def sensitivity(plan: Plan, chosen: Estimate) -> tuple[Trial, ...]:
    """One step up and one down in each degree; chunks a rank follow PP, so that chunks keep their size."""
    return tuple(attempt(plan, chosen, changes) for path in STEPS for changes in _steps(plan, path))


def _steps(plan: Plan, path: str) -> Iterator[dict[str, Any]]:
    table, _, name = path.partition(".")
    now, vpp = getattr(getattr(plan, table), name), plan.layout.vpp
    unused = (path in ("layout.ep", "layout.etp") and not plan.model.is_moe) or (
        path == "layout.vpp" and plan.layout.pp == 1
    )
    if now > 1 and now % 2 == 0:
        follow = {"layout.vpp": 2 * vpp if now > 2 else 1} if path == "layout.pp" and vpp > 1 else {}
        yield {path: now // 2, **follow}
    if not unused:
        follow = {"layout.vpp": vpp // 2} if path == "layout.pp" and vpp > 1 else {}
        yield {path: now * 2, **follow}


def attempt(plan: Plan, chosen: Estimate, changes: Mapping[str, Any]) -> Trial:
    """Judge and price the plan with some fields changed."""
    cuts = any(path in ("layout.pp", "layout.vpp") for path in changes)
    changes = {**changes, "layout.stages": None} if cuts and plan.layout.stages else changes
    tried = try_change(plan, changes, faults)
    if tried.plan is None or tried.findings:
        return Trial(changes, None, tried.reason)
    priced = estimate(tried.plan)
    if not priced.fits:
        need, have = format_bytes(needed_bytes(tried.plan, priced)), format_bytes(tried.plan.chip.memory_bytes)
        return Trial(changes, None, f"memory: {need} of {have} on stage {priced.memory.worst.stage}")
    gained = priced.tokens_per_second_per_gpu / chosen.tokens_per_second_per_gpu - 1
    return Trial(changes, gained, band=tried.time_band)


def needed_bytes(plan: Plan, guess: Estimate) -> float:
    """What the fullest rank needs as `fits` counts it."""
    return guess.memory.worst.device_bytes_at(fit_band(plan))


def comparisons(plan: Plan, chosen: Estimate) -> tuple[Comparison, ...]:
    """Every candidate that the plan does not have, tried alone; the most promising first, the impossible last."""
    found = [Comparison(attempt(plan, chosen, changes), one) for changes, one in _candidates(plan)]
    return tuple(sorted(found, key=lambda one: -1.0 if one.trial.effect is None else -1.0 - one.trial.effect))


def _candidates(plan: Plan) -> Iterator[tuple[dict[str, Any], Candidate]]:
    knobs, chip = plan.knobs, plan.chip
    if chip.architecture == "cpu":
        return
    for one in dispatcher_candidates(chip) if plan.layout.ep > 1 else ():
        if one.value != knobs.dispatcher:
            yield {"knobs.dispatcher": one.value}, one
    for one in precision_candidates(chip):
        if one.value != knobs.precision and one.value in ("bf16", *low_precisions(plan)):
            yield {"knobs.precision": one.value}, one
    for scopes in wider_graphs(plan)[:1]:  # the next step alone: attention is compared with routing, not with nothing
        yield {"knobs.graphs": list(scopes)}, GRAPH_CANDIDATES[-1 if "attn" in scopes else 1]


def next_better(pricer: Pricer, short: list[Plan], best: Priced) -> NextBetter | None:
    """The plan that lacks the least memory among those that are faster, also once a single change makes them fit."""
    bar = best.tokens_per_second * (1 + FASTER)
    promising = [plan for plan in short if pricer.promise(plan.layout, plan.job.micro_batch, plan.knobs) > bar]
    promising = sorted(promising, key=lambda plan: pricer.least_need(plan.layout, plan.job.micro_batch, plan.knobs))
    faster = (plan for plan in promising if pricer.speed(plan) > bar and not faults(plan))
    over = list(islice(faster, MOST_SHORT))
    for plan in sorted(over, key=pricer.need):
        cures = tuple(_cures(plan, best))
        if cures:
            guess = estimate(plan)
            need, have = needed_bytes(plan, guess), plan.chip.memory_bytes
            effect = pricer.speed(plan) / best.tokens_per_second - 1
            return NextBetter(plan, effect, need, have, guess.memory.worst.stage, cures)
    return None


def _cures(plan: Plan, best: Priced) -> Iterator[Trial]:
    """Single changes under which the plan fits and is faster than the chosen one on the same hardware."""
    for changes, other in _lighter(plan):
        rival = replace(
            best.plan,
            cluster=other.cluster,
            layout=replace(best.plan.layout, gpus=other.layout.gpus),
            job=replace(best.plan.job, global_batch=other.job.global_batch),
        )
        effect, have = gain(rival, other), other.chip.memory_bytes
        if effect > FASTER and fullest_bytes(other, fit_band(other), have) <= have and not faults(other):
            yield Trial(changes, effect)


def _lighter(plan: Plan) -> Iterator[tuple[dict[str, Any], Plan]]:
    knobs, gpus = plan.knobs, plan.layout.gpus
    if can_split_masters(plan):
        yield {"knobs.store_param_remainders": True}, replace(plan, knobs=replace(knobs, store_param_remainders=True))
    yield {"knobs.optimizer_dtype": "bf16"}, replace(plan, knobs=replace(knobs, optimizer_dtype="bf16"))
    yield {"knobs.grad_dtype": "bf16"}, replace(plan, knobs=replace(knobs, grad_dtype="bf16"))
    if not knobs.optimizer_offload:
        yield {"knobs.optimizer_offload": 1.0}, replace(plan, knobs=replace(knobs, optimizer_offload=1.0))
    wider = replace(
        plan,
        cluster=replace(plan.cluster, gpus=2 * gpus),
        layout=replace(plan.layout, gpus=2 * gpus),
        job=replace(plan.job, global_batch=2 * plan.job.global_batch),
    )
    yield {"cluster.gpus": 2 * gpus, "job.global_batch": wider.job.global_batch}, wider
    for chip in CHIPS.values():
        if chip.architecture == plan.chip.architecture and chip.memory_bytes > plan.chip.memory_bytes:
            yield (
                {"cluster.chip": chip.name},
                replace(plan, cluster=replace(plan.cluster, chip=chip.name, measured=None)),
            )
