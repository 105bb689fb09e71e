"""Finishing touches on the few best: no more offload than needed, knobs that follow from others."""

from dataclasses import replace
from typing import Any

from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.rules.overlap import overlap_needs_connections
from threefold.search.legal import faults
from threefold.search.price import Priced, Pricer
from threefold.search.space import Space

GAIN = 0.002  # predicted, from which a further knob is worth setting
CHOSEN = (
    *(f"layout.{name}" for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "stages")),
    *(f"job.{name}" for name in ("global_batch", "micro_batch")),
    *(
        f"knobs.{name}"
        for name in (
            "precision",
            "dispatcher",
            "recompute",
            "ep_overlap",
            "delay_wgrad",
            "graphs",
            "optimizer_offload",
            "data_parallel",
            "cp_comm",
            "max_connections",
        )
    ),
)


def refined(space: Space, pricer: Pricer, one: Priced) -> Priced:
    """The same layout, finished."""
    other = _delayed_wgrad(space, pricer, _less_offload(space, pricer, one))
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
    return parsed.plan


def _less_offload(space: Space, pricer: Pricer, one: Priced) -> Priced:
    if one.plan.knobs.optimizer_offload < 1 or not space.free("knobs.optimizer_offload"):
        return one
    for part in (0.25, 0.5, 0.75):
        knobs = replace(one.plan.knobs, optimizer_offload=part)
        if pricer.fits(one.plan.layout, one.plan.job.micro_batch, knobs):
            return pricer.priced(replace(one.plan, knobs=knobs))
    return one


def _delayed_wgrad(space: Space, pricer: Pricer, one: Priced) -> Priced:
    if not one.plan.knobs.ep_overlap or not space.free("knobs.delay_wgrad"):
        return one
    other = pricer.priced(replace(one.plan, knobs=replace(one.plan.knobs, delay_wgrad=True)))
    return other if other.tokens_per_second > one.tokens_per_second * (1 + GAIN) else one


def _connected(space: Space, plan: Plan) -> Plan:
    """EP overlap needs hardware queues (overlap-needs-connections)."""
    if not space.free("knobs.max_connections"):
        return plan
    for finding in overlap_needs_connections(plan):
        return replace(plan, knobs=replace(plan.knobs, max_connections=(finding.fix or {})["knobs.max_connections"]))
    return plan
