"""Finishing touches on the few best: less offload, knobs that pay, and no warning that costs nothing to heed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from threefold.cost.estimate import Estimate, estimate
from threefold.cost.expert_load import is_uneven
from threefold.findings import FindingsError
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.remedies.advise import WORTH
from threefold.rules.all import judge
from threefold.rules.knobs.overlap import overlap_needs_connections
from threefold.search.knobs import context_types, graph_scopes
from threefold.search.legal import faults
from threefold.search.price import Priced, Pricer
from threefold.search.space import Space

LOSS = 0.001  # of throughput at most that heeding a warning may cost
MOST_HEEDED = 6
MOST_WAYS = 4  # of one finding that are tried
DEGREES = tuple(f"layout.{name}" for name in ("tp", "cp", "pp", "ep", "etp"))  # ranked, not changed afterwards
CHOSEN = (
    *(f"layout.{name}" for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "stages")),
    *(f"job.{name}" for name in ("global_batch", "micro_batch")),
    *(
        f"knobs.{name}"
        for name in (
            "precision",
            "dispatcher",
            "expert_balance",
            "recompute",
            "recompute_save",
            "ep_overlap",
            "delay_wgrad",
            "tp_overlap",
            "expert_fusion",
            "delta_kernels",
            "graphs",
            "optimizer_offload",
            "data_parallel",
            "cp_comm",
            "cp_exchange",
            "max_connections",
        )
    ),
)


def refined(space: Space, pricer: Pricer, one: Priced) -> Priced:
    """The same layout, finished."""
    other = _improved(space, pricer, _less_offload(space, pricer, one))
    other = replace(other, plan=_connected(space, other.plan))
    return one if faults(other.plan) else other


def rebuilt(space: Space, plan: Plan) -> Plan:
    """A real plan, parsed from the fields of the draft and what the search chose for the free ones."""
    fields: dict[str, Any] = dict(space.given)
    for path in CHOSEN:
        table, _, name = path.partition(".")
        value = getattr(getattr(plan, table), name)
        if space.free(path) and value != FIELDS[path].default:
            fields[path] = value
    fields["cluster.gpus"] = plan.layout.gpus
    parsed = parse(fields, model=None if any(p.startswith("model.") for p in fields) else space.base.model)
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    return parsed.plan.on_chip(space.base.cluster.measured)


def _less_offload(space: Space, pricer: Pricer, one: Priced) -> Priced:
    if one.plan.knobs.optimizer_offload < 1 or not space.free("knobs.optimizer_offload"):
        return one
    for part in (0.25, 0.5, 0.75):
        knobs = replace(one.plan.knobs, optimizer_offload=part)
        if pricer.fits(one.plan.layout, one.plan.job.micro_batch, knobs):
            return pricer.priced(replace(one.plan, knobs=knobs))
    return one


def _improved(space: Space, pricer: Pricer, one: Priced) -> Priced:
    """Knobs that are predicted to pay, one after the other."""
    for switched in _switches(space, one.plan):
        plan = replace(one.plan, knobs=replace(one.plan.knobs, **switched))
        if pricer.speed(plan) <= one.tokens_per_second * (1 + WORTH):
            continue
        if pricer.fits(plan.layout, plan.job.micro_batch, plan.knobs) and not faults(_connected(space, plan)):
            one = pricer.priced(plan)
    return one


def _switches(space: Space, plan: Plan) -> Iterator[dict[str, Any]]:
    """Free knobs that change speed and nothing else, with the values to try."""
    knobs, wanted = plan.knobs, list[dict[str, Any]]()
    if is_uneven(plan) and plan.target == "threefold" and knobs.expert_balance == "none":
        wanted.append({"expert_balance": "replicate", "dispatcher": "alltoall"})
    if knobs.ep_overlap and not knobs.delay_wgrad:
        wanted.append({"delay_wgrad": True})
    if plan.layout.tp > 1 and not knobs.tp_overlap:
        wanted.append({"tp_overlap": True})
    if plan.layout.cp > 1:  # the best kind at the foot of the ladder need not be that of the rung
        wanted += [{"cp_comm": kind} for kind in context_types(space, plan.layout) if kind != knobs.cp_comm]
    if plan.target == "threefold" and plan.full_recompute and not knobs.recompute_save:
        wanted.append({"recompute_save": ("core_attn",)})
    if not knobs.graphs and not plan.full_recompute:
        within = "moe" in knobs.recompute
        for scopes in graph_scopes(space, plan.layout, knobs):
            kept = tuple(scope for scope in scopes if not (within and scope.startswith("moe")))
            wanted.append({"graphs": kept})
    for switched in wanted:
        changed = {name: value for name, value in switched.items() if value != getattr(knobs, name)}
        if changed and all(changed.values()) and all(space.free(f"knobs.{name}") for name in changed):
            yield changed


def heeded(space: Space, plan: Plan) -> tuple[Plan, Estimate]:
    """A finished plan without the warnings that a fix of free fields cures at no loss of predicted throughput."""
    guess = estimate(plan)
    for _ in range(MOST_HEEDED):
        better = next(_cured(space, plan, guess), None)
        if better is None:
            break
        plan, guess = better
    return plan, guess


def _cured(space: Space, plan: Plan, guess: Estimate) -> Iterator[tuple[Plan, Estimate]]:
    said = judge(plan)
    ways = (way for finding in said for way in islice(chain([finding.fix or {}], finding.fixes), MOST_WAYS))
    for fix in ways:
        if not fix or any(path not in CHOSEN or path in DEGREES or not space.free(path) for path in fix):
            continue
        try:
            other = change(plan, fix)
        except FindingsError:
            continue
        if faults(other):  # asked first: what does not fill its ranks has no estimate
            continue
        found = estimate(other)
        slower = found.tokens_per_second_per_gpu < guess.tokens_per_second_per_gpu * (1 - LOSS)
        fuller = found.memory.device_bytes > guess.memory.device_bytes
        if not slower and not fuller and found.fits and len(judge(other)) < len(said):
            yield other, found


def _connected(space: Space, plan: Plan) -> Plan:
    """EP overlap needs hardware queues (overlap-needs-connections)."""
    if not space.free("knobs.max_connections"):
        return plan
    for finding in overlap_needs_connections(plan):
        return replace(plan, knobs=replace(plan.knobs, max_connections=(finding.fix or {})["knobs.max_connections"]))
    return plan
