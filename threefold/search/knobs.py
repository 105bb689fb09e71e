"""Knobs a search may set: transports and overlaps of a layout, and the ladder that trades time for memory."""

from dataclasses import dataclass, replace

from threefold.cost.delta_rule import heads_in_delta_layers
from threefold.cost.format_support import can_fuse_experts, low_precisions
from threefold.layout.degrees import Layout, axis_link
from threefold.plan.plan import Knobs
from threefold.remedies.graph_scopes import engine_scopes, wider_graphs
from threefold.rules.knobs.dispatch import delta_kernels_have_use
from threefold.search.published_layouts import published_layouts
from threefold.search.space import Space
from threefold.spec.candidates import dispatcher_candidates, precision_candidates

WHOLE = "full_iteration"


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: what is recomputed, and the part of the optimizer that moves to the host."""

    recompute: tuple[str, ...]
    offload: float


def precisions(space: Space) -> list[str]:
    """The fixed one; BF16, or where that gives no plan a format that chip and stack multiply; all where the draft says
    that they were measured. NVFP4 comes after a stable run (nvfp4-after-stable)."""
    plan = space.base
    if not space.free("knobs.precision"):
        return [plan.knobs.precision]
    start = precision_candidates(plan.chip)[0].value
    low = [name for name in low_precisions(plan) if name != "nvfp4"]
    if "precision" in plan.stack.measured:
        return [start, *low]
    return low[:1] if space.low_precision else [start]


def shardings(space: Space, layout: Layout) -> list[str]:
    """ZeRO-1; or FSDP, without a pipeline (fsdp-pipeline-is-untried), for models that see, for dense ones, and for
    models that were trained so; for others only where the preferred degrees give no plan."""
    plan = space.base
    fixed = plan.knobs.data_parallel
    if not space.free("knobs.data_parallel"):
        return [fixed] if layout.pp == 1 or fixed == "zero1" else []
    known = plan.is_vlm or not plan.model.is_moe
    known = known or any(one.data_parallel == "fsdp" for one in published_layouts() if one.model == plan.model_name)
    cuts = layout.pp == 1 and layout.dp * layout.cp > 1
    return ["zero1", "fsdp"] if cuts and (known or space.relaxed) else ["zero1"]


def context_types(space: Space, layout: Layout) -> list[str | tuple[str, ...]]:
    """How CP communicates: a ring, or heads traded for sequence where they divide (cp-a2a-divides-heads)."""
    plan = space.base
    attention = plan.model.attention
    if not space.free("knobs.cp_comm") or layout.cp == 1 or attention is None:
        return [plan.knobs.cp_comm]
    types: list[str | tuple[str, ...]] = ["p2p"]
    heads = (attention.num_heads, attention.num_kv_heads)
    if all(count % (layout.tp * layout.cp) == 0 for count in heads):
        types.append("a2a")
    crosses = axis_link(layout, "cp", plan.cluster.domain_ranks).link == "network"
    if crosses and all(count % (layout.tp * 2) == 0 for count in heads):
        types.append("a2a+p2p")
    by_layer = heads_in_delta_layers(replace(plan, layout=layout))
    return [*types, by_layer] if by_layer else types


def dispatchers(space: Space, layout: Layout) -> list[str]:
    """All-to-all, which an A/B compares with the chip's other candidates; all of them where the draft says that they
    were measured."""
    plan = space.base
    if not space.free("knobs.dispatcher") or layout.ep * layout.etp == 1:
        return [plan.knobs.dispatcher]
    names = [one.value for one in dispatcher_candidates(plan.chip)]
    return names if "dispatcher" in plan.stack.measured else names[:1]


def overlaps(space: Space, layout: Layout) -> list[bool]:
    """Without and with EP overlap, where the rules of `rules/knobs/overlap.py` allow it."""
    plan = space.base
    can = layout.ep > 1 and plan.mtp <= 1 and (layout.pp == 1 or layout.vpp > 1)
    can = can and plan.knobs.precision != "fp32" and not plan.knobs.shared_expert_overlap
    if not space.free("knobs.ep_overlap"):
        return [plan.knobs.ep_overlap] if can or not plan.knobs.ep_overlap else []
    return [False, True] if can and plan.chip.architecture != "cpu" else [False]


def graph_scopes(space: Space, layout: Layout, knobs: Knobs) -> list[tuple[str, ...]]:
    """None: a run starts eager, and an A/B decides. Where the draft says that graphs were measured, also their steps
    from narrow to wide, and the whole microbatch as one graph on one GPU alone, where our engine was measured with it.
    """
    base = space.base
    if not space.free("knobs.graphs"):
        return [base.knobs.graphs]
    blocked = knobs.activation_offload or knobs.activation_offload_layers or knobs.compile
    blocked = blocked or base.job.dynamic_length or base.job.packing
    if "graphs" not in base.stack.measured or base.chip.architecture == "cpu" or blocked:
        return [()]
    plan = replace(base, layout=layout, knobs=replace(knobs, graphs=()))
    options = [(), *wider_graphs(plan)]
    if base.target == "threefold" and layout.gpus == 1 and not knobs.optimizer_offload:
        options.append(engine_scopes(plan, (WHOLE,)))
    return list(dict.fromkeys(options))


def foot(space: Space, layout: Layout, precision: str) -> Knobs:
    """The knobs of a precision at the foot of the ladder: the simplest transport, experts fused where kernels run."""
    knobs = replace(space.base.knobs, precision=precision, dispatcher=dispatchers(space, layout)[0])
    knobs = replace(knobs, cp_comm=context_types(space, layout)[0])
    if space.free("knobs.expert_fusion") and can_fuse_experts(replace(space.base, layout=layout, knobs=knobs)):
        knobs = replace(knobs, expert_fusion=True)
    if space.free("knobs.delta_kernels") and space.base.target == "threefold":
        knobs = replace(knobs, delta_kernels="fla")
        if any(delta_kernels_have_use(replace(space.base, layout=layout, knobs=knobs))):
            knobs = replace(knobs, delta_kernels=None)
    return knobs


def on_rung(knobs: Knobs, rung: Rung, free_graphs: bool) -> Knobs:
    """The knobs on a rung; graph scopes that its recompute excludes are left out."""
    graphs = knobs.graphs
    if free_graphs and WHOLE in graphs:
        graphs = () if rung.offload else graphs
    elif free_graphs and "full" in rung.recompute:
        graphs = ()
    elif free_graphs and "moe" in rung.recompute:
        graphs = tuple(scope for scope in graphs if not scope.startswith("moe"))
    return replace(knobs, recompute=rung.recompute, optimizer_offload=rung.offload, graphs=graphs)
