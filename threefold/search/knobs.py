"""Knobs a search may set: transports and overlaps of a layout, and the ladder that trades time for memory."""

from dataclasses import dataclass, replace

from threefold.cost.format_support import can_fuse_experts, starting_precision
from threefold.layout.degrees import Layout
from threefold.layout.links import axis_link
from threefold.plan.plan import Knobs
from threefold.rules.knobs.engine_graphs import engine_scopes
from threefold.search.space import Space
from threefold.spec.chips import NATIVE_FORMATS
from threefold.spec.stacks import DISPATCHER_CHIPS, GRAPH_SCOPES, default_dispatcher, runs_dispatcher

WHOLE = "full_iteration"
FLEX_FROM = 8  # past this EP plain alltoall is no starting point (dispatcher-default-for-chip)


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: what is recomputed, and the part of the optimizer that moves to the host."""

    recompute: tuple[str, ...]
    offload: float


def precisions(space: Space) -> list[str]:
    """The fixed one, or bf16 and the platform's default where that is not emulated (precision-is-emulated); NVFP4 comes
    after a stable run (nvfp4-after-stable)."""
    plan = space.base
    if not space.free("knobs.precision"):
        return [plan.knobs.precision]
    native = NATIVE_FORMATS[plan.chip.architecture]
    return [name for name in dict.fromkeys((starting_precision(plan), "bf16")) if name in native]


def shardings(space: Space, layout: Layout) -> list[str]:
    """ZeRO-1, or FSDP where there is no pipeline (fsdp-excludes-pipeline)."""
    fixed = space.base.knobs.data_parallel
    if not space.free("knobs.data_parallel"):
        return [fixed] if layout.pp == 1 or fixed == "zero1" else []
    return ["zero1", "fsdp"] if layout.pp == 1 and layout.dp * layout.cp > 1 else ["zero1"]


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
    return types


def dispatchers(space: Space, layout: Layout) -> list[str]:
    """What runs on the chip, what needs no reason first: others have to win by more than their band.

    For our engine, and at small EP, that is alltoall: DeepEP and HybridEP are built from source. Past EP 8 it is the
    platform's default where Megatron's containers have it.
    """
    plan = space.base
    if not space.free("knobs.dispatcher") or layout.ep * layout.etp == 1:
        return [plan.knobs.dispatcher]
    flex = [name for name in DISPATCHER_CHIPS if runs_dispatcher(name, plan.chip)]
    if plan.target == "threefold" and axis_link(layout, "ep", plan.cluster.domain_ranks).link == "domain":
        return ["alltoall"]  # over NVLink exchanges are too small a part of a step for such a gain
    if plan.target == "threefold" or layout.ep <= FLEX_FROM or not flex:
        return ["alltoall", *flex]
    return [name for name in dict.fromkeys((default_dispatcher(plan.chip).value, *flex)) if name in flex]


def overlaps(space: Space, layout: Layout) -> list[bool]:
    """Without and with EP overlap, where the rules of `rules/knobs/overlap.py` allow it."""
    plan = space.base
    can = layout.ep > 1 and plan.mtp <= 1 and (layout.pp == 1 or layout.vpp > 1)
    can = can and plan.knobs.precision != "fp32" and not plan.knobs.shared_expert_overlap
    if not space.free("knobs.ep_overlap"):
        return [plan.knobs.ep_overlap] if can or not plan.knobs.ep_overlap else []
    return [False, True] if can and plan.chip.architecture != "cpu" else [False]


def graph_scopes(space: Space, layout: Layout, knobs: Knobs) -> list[tuple[str, ...]]:
    """No graphs, or the dropless scopes, where our engine is to run the plan those of them that it records; then the
    whole microbatch as one graph, where it records that too.

    A vision-language model starts with the narrowest; `tune` widens them by one scope at a time. The whole microbatch
    is taken on one GPU alone, where it was measured: our engine has not yet recorded it on several.
    """
    base = space.base
    if not space.free("knobs.graphs"):
        return [base.knobs.graphs]
    blocked = knobs.activation_offload or knobs.activation_offload_layers or knobs.compile
    if base.chip.architecture == "cpu" or blocked or base.job.dynamic_length or base.job.packing:
        return [()]
    scopes = tuple(GRAPH_SCOPES.value.split()) if base.model.is_moe else ("attn",)
    if base.target == "threefold":
        scopes = engine_scopes(replace(base, layout=layout, knobs=knobs), scopes)
    scopes = scopes[:1] if base.is_vlm else scopes
    options: list[tuple[str, ...]] = [(), scopes] if scopes else [()]
    if base.target == "threefold" and layout.gpus == 1 and not knobs.optimizer_offload:
        whole = engine_scopes(replace(base, layout=layout, knobs=knobs), (WHOLE,))
        options += [whole] if whole else []
    return options


def foot(space: Space, layout: Layout, precision: str) -> Knobs:
    """The knobs of a precision at the foot of the ladder: the simplest transport, experts fused where kernels run."""
    knobs = replace(space.base.knobs, precision=precision, dispatcher=dispatchers(space, layout)[0])
    knobs = replace(knobs, cp_comm=context_types(space, layout)[0])
    if space.free("knobs.expert_fusion") and can_fuse_experts(replace(space.base, layout=layout, knobs=knobs)):
        knobs = replace(knobs, expert_fusion=True)
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
