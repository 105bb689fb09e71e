"""Walls: what holds a plan back by estimate, and what the documents change about it, each with its predicted gain.

A wall is a note: the plan runs, and nothing is wrong with it. `check` names only cures that are legal here and
predicted to gain (`rules/fixes.py`); `search/neighbours.py` tries the same remedies on the plan that a search has
chosen.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from threefold.cost.estimate import MEMORY_BOUND, WALLS
from threefold.cost.format_support import can_split_masters, low_precisions
from threefold.cost.memory.by_stack import memory
from threefold.cost.memory_ladder import fits
from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.rules.base import divisors, rule
from threefold.rules.knobs.dispatch import fuses_experts
from threefold.rules.knobs.engine_graphs import wider_graphs
from threefold.rules.knobs.overlap import overlap_needs_connections
from threefold.rules.layout.batch import can_be_priced
from threefold.spec.candidates import dispatcher_candidates
from threefold.units import format_bytes

# Shares of the step from which a kind of work is a wall.
HOST_SHARE = 0.25
COMMUNICATION_SHARE = 0.35
COMPUTE_SHARE = 0.6


@lru_cache(maxsize=64)
def _shares(plan: Plan) -> dict[str, float]:
    """The share of each kind of work in the predicted step; none where the plan cannot be priced."""
    if not can_be_priced(plan) or not plan.num_microbatches or plan.chip.architecture == "cpu":
        return {}
    spent = step_time(plan, rates_of(plan))
    return {wall: sum(spent.terms[term] for term in terms) / spent.step_seconds for wall, terms in WALLS.items()}


def remedies(plan: Plan, wall: str) -> Iterator[Changes]:
    """What the documents change for a wall, in their order. Nothing is said of whether it is legal or helps."""
    yield from {"host": _for_host, "communication": _for_communication, "compute": _for_compute}[wall](plan)


def _for_host(plan: Plan) -> Iterator[Changes]:
    """Graphs, then a larger microbatch; garbage collection and CPU affinity have no price."""
    yield from ({"knobs.graphs": list(scopes)} for scopes in wider_graphs(plan))
    yield {"job.micro_batch": 2 * plan.job.micro_batch}
    yield {"job.micro_batch": 4 * plan.job.micro_batch}


def _for_communication(plan: Plan) -> Iterator[Changes]:
    """Overlap, then the dispatcher, then where ranks are placed."""
    knobs, layout = plan.knobs, plan.layout
    reduces = {"knobs.grad_reduce_overlap": True, "knobs.param_gather_overlap": True}
    if not (knobs.grad_reduce_overlap and knobs.param_gather_overlap):
        yield {path: value for path, value in reduces.items() if not getattr(knobs, path.partition(".")[2])}
    if layout.ep > 1:
        if not knobs.ep_overlap:
            yield _ep_overlap(plan)
        elif not knobs.delay_wgrad:
            yield {"knobs.delay_wgrad": True}
    if layout.tp > 1 and not knobs.tp_overlap:
        yield {"knobs.tp_overlap": True}
    yield from _dispatchers(plan)
    domain, experts = plan.cluster.domain_ranks, plan.model.num_experts
    if plan.link("tp").link == "network":
        yield from ({"layout.tp": tp} for tp in reversed(divisors(layout.tp)) if tp <= domain)
    if experts and plan.link("ep").link == "network":
        yield from ({"layout.ep": ep} for ep in reversed(divisors(layout.ep)) if ep * layout.etp <= domain)
    if layout.cp > 1 and plan.link("cp").link == "network":
        yield from ({"knobs.cp_comm": kind} for kind in ("a2a+p2p", "a2a", "p2p") if kind != knobs.cp_comm)
    if layout.tp > 1:
        yield {"layout.tp": layout.tp // 2}


def _ep_overlap(plan: Plan) -> Changes:
    """EP overlap with what it asks for: chunks of a pipeline, and hardware queues where the launcher leaves one."""
    knobs, layout = plan.knobs, plan.layout
    changes: Changes = {"knobs.ep_overlap": True}
    if knobs.shared_expert_overlap:
        changes |= {"knobs.shared_expert_overlap": False}
    if layout.pp > 1 and layout.vpp == 1:
        changes |= {"layout.vpp": 2, "layout.stages": None, "layout.schedule": None}
    probe = replace(plan, knobs=replace(knobs, ep_overlap=True))
    return changes | ({"knobs.max_connections": 32} if any(overlap_needs_connections(probe)) else {})


def _dispatchers(plan: Plan) -> Iterator[Changes]:
    knobs = plan.knobs
    for one in dispatcher_candidates(plan.chip):
        if one.value != knobs.dispatcher and plan.layout.ep > 1:
            yield {"knobs.dispatcher": one.value}


def _for_compute(plan: Plan) -> Iterator[Changes]:
    """Fused kernels, then a lower precision, then fewer multiprocessors for the dispatcher."""
    knobs = plan.knobs
    if plan.model.is_moe and not knobs.expert_fusion and fuses_experts(plan):
        yield {"knobs.expert_fusion": True}
    if not knobs.permute_fusion and plan.target != "threefold":
        yield {"knobs.permute_fusion": True}
    for name in low_precisions(plan):
        if name not in (knobs.precision, "nvfp4"):  # nvfp4-after-stable
            yield {"knobs.precision": name}
    if knobs.dispatch_sms and knobs.dispatch_sms > 16:
        yield {"knobs.dispatch_sms": 16}


@rule(severity="note", rows="PW-HOSTSIG HO-GC HO-AFF HO-MBS")
def host_wall(plan: Plan) -> Iterator[Finding]:
    """The host takes less than a quarter of the step.

    Why: where launches take longer than the kernels they launch, the GPU waits; gaps between kernels are the sign.
        Upstream counted this to the compute wall until 2026-08-01, and has other evidence and cures for it since.
    Confirm: `threefold estimate` prints the host's time; in a trace, gaps between kernels on all ranks.
    Fix: graphs, garbage collection by hand, CPU affinity, a larger microbatch.
    """
    share = _shares(plan).get("host", 0.0)
    if share > HOST_SHARE:
        unpriced = []
        if plan.run.gc_every == 0:
            unpriced.append("run.gc_every=50")
        if plan.target == "threefold" and plan.run.cores is None:
            unpriced.append("run.cores=auto")
        yield Finding(
            at="knobs",
            problem=f"the host takes {share:.0%} of the predicted step",
            fixes=remedies(plan, "host"),
            advice=f"not priced, measure: {' '.join(unpriced)}" if unpriced else "keep garbage collection off the step",
        )


@rule(severity="note", rows="PW-COMMSIG OV-DP OV-TP")
def communication_wall(plan: Plan) -> Iterator[Finding]:
    """Exposed communication and the pipeline's bubble take about a third of the step at most.

    Why: what is not hidden behind compute is lost; large exposed collectives in a trace are the sign.
    Confirm: `threefold estimate` prints the exposed time of each axis.
    Fix: overlap, then an A/B of dispatchers, then placement: the axis with most traffic inside NVLink.
    """
    shares = _shares(plan)
    if shares.get("communication", 0.0) > COMMUNICATION_SHARE:
        spent = step_time(plan, rates_of(plan))
        worst = max(WALLS["communication"], key=lambda term: spent.terms[term])
        yield Finding(
            at="layout",
            problem=f"exposed communication takes {shares['communication']:.0%} of the predicted step, "
            f"most of it {worst}",
            fixes=remedies(plan, "communication"),
            advice="a trace tells which collectives stand alone",
        )


@rule(severity="note", rows="PW-COMPSIG")
def compute_wall(plan: Plan) -> Iterator[Finding]:
    """Where compute takes most of the step, nothing is left that would shorten it.

    Why: once communication is hidden and the host keeps up, kernels decide: fused experts, fewer bits, fewer
        multiprocessors for dispatch.
    Confirm: `threefold estimate` prints compute by kind; in a trace, kernels without gaps.
    Fix: fused kernels, an A/B in FP8, dispatch_sms.
    """
    share = _shares(plan).get("compute", 0.0)
    if share > COMPUTE_SHARE:
        problem = f"compute takes {share:.0%} of the predicted step"
        yield Finding(at="knobs", problem=problem, fixes=remedies(plan, "compute"))


@rule(severity="note", rows="PW-MEMSIG", needs_fix=True)
def memory_wall(plan: Plan) -> Iterator[Finding]:
    """Less than nine tenths of the memory are used, so that a longer sequence or a skewed batch still fits.

    Why: a plan that fills the memory has no room for skew, and pays for what makes it fit with time.
    Confirm: `threefold estimate` prints the peak by stage and term.
    Fix: states in fewer bits cost next to no time; then the steps of the ladder.
    """
    if not can_be_priced(plan) or plan.chip.architecture == "cpu" or not fits(plan):
        return
    need, have = memory(plan).worst.device_bytes, plan.chip.memory_bytes
    if need > MEMORY_BOUND * have:
        yield Finding(
            at="layout",
            problem=f"{format_bytes(need)} of {format_bytes(have)} are predicted to be used: {need / have:.0%}",
            fixes=_leaner(plan),
        )


def _leaner(plan: Plan) -> Iterator[Changes]:
    """States in fewer bits, then norms and activations of experts redone, where that leaves room."""
    knobs, most = plan.knobs, MEMORY_BOUND * plan.chip.memory_bytes
    tried: dict[str, Any] = {"store_param_remainders": True} if can_split_masters(plan) else {}
    tried |= {"optimizer_dtype": "bf16", "grad_dtype": "bf16"}
    if plan.low_precision and plan.target != "threefold":
        tried["fp8_params"] = True
    ways = [{name: value} for name, value in tried.items() if getattr(knobs, name) != value]
    if not plan.full_recompute:
        names = [name for name in ("layernorm", "moe_act", "mlp") if name not in knobs.recompute]
        ways += [{"recompute": (*knobs.recompute, name)} for name in names]
    for way in ways:
        if memory(replace(plan, knobs=replace(knobs, **way))).worst.device_bytes <= most:
            yield {f"knobs.{name}": list(value) if isinstance(value, tuple) else value for name, value in way.items()}
