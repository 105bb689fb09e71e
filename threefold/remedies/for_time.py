"""Changes that shorten a step, by what holds it back: the host, communication or compute. `catalogue.py` lists them.

Each function yields the ways of one remedy. Whether a way is legal, and whether it gains, is for `advise` to see.
"""

from collections.abc import Callable, Iterator

from threefold.cost.delta_rule import heads_in_delta_layers
from threefold.cost.expert_load import is_uneven
from threefold.cost.format_support import low_precisions
from threefold.findings import Changes
from threefold.plan.plan import INSIDE_MOE, Plan
from threefold.remedies.graph_scopes import wider_graphs
from threefold.remedies.recompute_sets import fitting_sets
from threefold.spec.candidates import dispatcher_candidates

Ways = Callable[[Plan], Iterator[Changes]]


def turned_on(*names: str, only_if: Callable[[Plan], bool] = lambda plan: True) -> Ways:
    """Those of these knobs that are off, turned on together."""

    def ways(plan: Plan) -> Iterator[Changes]:
        off: Changes = {f"knobs.{name}": True for name in names if not getattr(plan.knobs, name)}
        if off and only_if(plan):
            yield off

    return ways


def graphs(plan: Plan) -> Iterator[Changes]:
    yield from ({"knobs.graphs": list(scopes)} for scopes in wider_graphs(plan))


def larger_microbatch(plan: Plan) -> Iterator[Changes]:
    yield from ({"job.micro_batch": factor * plan.job.micro_batch} for factor in (2, 4))


def collect_garbage(plan: Plan) -> Iterator[Changes]:
    if plan.run.gc_every == 0:
        yield {"run.gc_every": 50}


def pin_cores(plan: Plan) -> Iterator[Changes]:
    if plan.target == "threefold" and plan.run.cores is None:
        yield {"run.cores": "auto"}


def copy_experts(plan: Plan) -> Iterator[Changes]:
    """In one slot a rank, or in two."""
    if plan.target == "threefold" and is_uneven(plan) and plan.knobs.expert_balance == "none":
        slots: tuple[int | None, ...] = (None, 2)
        yield from ({"knobs.expert_balance": "replicate", "knobs.expert_copies": number} for number in slots)


def ep_overlap(plan: Plan) -> Iterator[Changes]:
    """With what it asks for: chunks of a pipeline, and hardware queues where the launcher leaves one."""
    knobs, layout = plan.knobs, plan.layout
    if layout.ep == 1 or knobs.ep_overlap:
        return
    changes: Changes = {"knobs.ep_overlap": True}
    if knobs.shared_expert_overlap:
        changes |= {"knobs.shared_expert_overlap": False}
    if layout.pp > 1 and layout.vpp == 1:
        changes |= {"layout.vpp": 2, "layout.stages": None, "layout.schedule": None}
    yield changes
    yield changes | {"knobs.max_connections": 32}


def dispatcher(plan: Plan) -> Iterator[Changes]:
    if plan.layout.ep > 1:
        values = (one.value for one in dispatcher_candidates(plan.chip))
        yield from ({"knobs.dispatcher": value} for value in values if value != plan.knobs.dispatcher)


def tp_inside_domain(plan: Plan) -> Iterator[Changes]:
    if plan.link("tp").link == "network":
        tps = _smaller(plan.layout.tp)
        yield from ({"layout.tp": tp} for tp in tps if tp <= plan.cluster.domain_ranks)


def ep_inside_domain(plan: Plan) -> Iterator[Changes]:
    if plan.model.num_experts and plan.link("ep").link == "network":
        eps = _smaller(plan.layout.ep)
        yield from ({"layout.ep": ep} for ep in eps if ep * plan.layout.etp <= plan.cluster.domain_ranks)


def ep_before_etp(plan: Plan) -> Iterator[Changes]:
    if plan.layout.etp > 1:
        yield {"layout.ep": plan.layout.ep * plan.layout.etp, "layout.etp": 1}


def exchange_of_keys(plan: Plan) -> Iterator[Changes]:
    if plan.layout.cp > 1 and plan.link("cp").link == "network":
        yield from ({"knobs.cp_comm": kind} for kind in ("a2a+p2p", "a2a", "p2p") if kind != plan.knobs.cp_comm)


def heads_of_delta(plan: Plan) -> Iterator[Changes]:
    kinds = heads_in_delta_layers(plan)
    if kinds and "a2a" not in plan.knobs.cp_comm:
        yield {"knobs.cp_comm": list(kinds)}


def less_tp(plan: Plan) -> Iterator[Changes]:
    if plan.layout.tp > 1:
        yield {"layout.tp": plan.layout.tp // 2}


def less_recompute(plan: Plan) -> Iterator[Changes]:
    """A selective set in place of whole layers; else the plan's own set without one of its modules."""
    names = plan.knobs.recompute
    if plan.full_recompute:
        units: Changes = {"knobs.recompute_method": None, "knobs.recompute_layers": None}
        yield from ({"knobs.recompute": each or None, **units} for each in fitting_sets(plan))
        return
    for name in names:
        rest = [other for other in names if other != name]
        yield {"knobs.recompute": rest or None}
        if name == "moe":
            yield {"knobs.recompute": [*rest, *sorted(INSIDE_MOE & {"moe_act"})]}


def precision(plan: Plan) -> Iterator[Changes]:
    """From sixteen bits down; other formats of eight bits are a comparison of their own."""
    for name in low_precisions(plan) if not plan.low_precision else ():
        if name != "nvfp4":  # nvfp4-after-stable
            yield {"knobs.precision": name}


def fewer_dispatch_sms(plan: Plan) -> Iterator[Changes]:
    if plan.knobs.dispatch_sms and plan.knobs.dispatch_sms > 16:
        yield {"knobs.dispatch_sms": 16}


def _smaller(degree: int) -> list[int]:
    """Divisors of a degree, the largest first."""
    return [each for each in range(degree - 1, 0, -1) if degree % each == 0]
