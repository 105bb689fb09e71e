"""CUDA graphs as Megatron Core validates and replays them."""

from collections.abc import Iterator

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.rules.base import megatron_refuses, rule, without
from threefold.spec.candidates import GRAPH_CANDIDATES
from threefold.spec.stacks import CORE_CONFIG

_OFFLOAD = "knobs.activation_offload"
_LAYER = "core/transformer/transformer_layer.py"


@megatron_refuses(
    CORE_CONFIG, "Token-drop MoE is temporarily not supported with activation offloading.", rows="CG-FGOFF OF-RULE"
)
def graph_of_experts_without_offload(plan: Plan) -> Iterator[Finding]:
    """Megatron offloads no activations where a graph holds the whole MoE layer.

    Why: its copies are ordered with the graphs of attention and router, and with one graph of the whole iteration
        (Megatron Core 0.18 and later, which then asks for a bound of copies that are under way; an export says 1).
    Confirm: `moe` in knobs.graphs with knobs.activation_offload.
    Fix: graphs that end before dispatch, or no offload.
    """
    if "moe" in plan.knobs.graphs and plan.knobs.activation_offload:
        fewer = {"knobs.graphs": without(plan.knobs.graphs, "moe")}
        fixes: list[dict[str, object]] = [{**fewer}, {"knobs.activation_offload": None}]
        yield Finding(at="knobs.graphs", problem="a graph of moe with activation offload", fixes=fixes)


@megatron_refuses(
    _LAYER, '"inference_context and packed_seq_params are excluded from input list. "', rows="CG-PACK CG-PACKPAD"
)
def packed_attention_in_no_scoped_graph(plan: Plan) -> Iterator[Finding]:
    """Megatron replays attention of packed documents in a graph of the whole iteration, or in none.

    Why: a graph of a layer takes tensors, and the boundaries of documents are none. Bridge 0.6 validates a scope of
        `attn` with offline packing (it asks for `pad_to_max_length` and `offline_packing_specs.pad_cu_seqlens`), but
        the layer of Megatron Core 0.19 still asserts that there are no boundaries: the code that runs decides.
    Confirm: `CUDA graph accepts only Tensor inputs` at the first replay.
    Fix: scopes without attention, or one graph of the whole iteration over padded data.
    """
    if "attn" in plan.knobs.graphs and plan.job.packing:
        fix = {"knobs.graphs": without(plan.knobs.graphs, "attn")}
        yield Finding(at="knobs.graphs", problem="attn with packed documents", fix=fix)


def has_paged_stash(plan: Plan) -> bool:
    """Whether an export asks for a paged stash: one graph of the iteration over buffers of a capacity per rank."""
    return plan.has_rank_capacity and "full_iteration" in plan.knobs.graphs


@megatron_refuses(CORE_CONFIG, "When moe_paged_stash is enabled, offload_modules must not include", rows="CG-PAGEDX")
def paged_stash_holds_experts(plan: Plan) -> Iterator[Finding]:
    """What the paged stash of a graph of the iteration holds is not offloaded by name.

    Why: the stash has the activations of experts, and a share of it can be on the host
        (moe_paged_stash_buffer_size_factor_cpu).
    Confirm: knobs.activation_offload with knobs.graphs and job.capacity_scope.
    Fix: delete the names of experts.
    """
    names = plan.knobs.activation_offload
    inside = [name for name in names if name in ("expert_fc1", "moe_act", "fused_group_mlp")]
    if has_paged_stash(plan) and inside:
        problem = f"offload of {', '.join(inside)}, which the paged stash holds"
        yield Finding(at=_OFFLOAD, problem=problem, fix={_OFFLOAD: without(names, *inside)})


@megatron_refuses(CORE_CONFIG, "moe_paged_stash cannot be enabled with cpu_offloading.", rows="CG-PAGEDREQ")
def paged_stash_keeps_layers(plan: Plan) -> Iterator[Finding]:
    """Whole layers are not offloaded next to a paged stash.

    Why: both replace what autograd saves of the experts.
    Confirm: knobs.activation_offload_layers with knobs.graphs and job.capacity_scope.
    Fix: no offload of layers.
    """
    if has_paged_stash(plan) and plan.knobs.activation_offload_layers:
        at = "knobs.activation_offload_layers"
        yield Finding(at=at, problem="offload of whole layers with a paged stash", fix={at: 0})


@rule(severity="note", target="megatron-bridge", rows="CG-NARROW CG-REPLAY CG-PROFIT")
def graph_of_attention_by_ab(plan: Plan) -> Iterator[Finding]:
    """In a dropless model `attn` joins moe_router and moe_preprocess after an A/B of its own.

    Why: capture is no gain by itself: one run with alltoall replayed 1.5% slower than eager. Until 2026-08-01 upstream
        started with attn, moe_router and moe_preprocess, and its tables of recipes still do; its skills on graphs and
        on the workflow now start without attn.
    Confirm: time steps after capture, see replays in the log or trace, and repeat the A/B on the final stack: another
        dispatcher or overlap can turn it round.
    Fix: none before the A/B; stack.measured=graphs where it was made.
    """
    knobs = plan.knobs
    is_dropless = plan.model.is_moe and plan.job.capacity_factor is None
    if is_dropless and "attn" in knobs.graphs and "graphs" not in plan.stack.measured:
        since = GRAPH_CANDIDATES[-1].since
        problem = f"attn in a graph is an A/B of its own ({since}), and not known to be measured here"
        advice = "compare with moe_router,moe_preprocess on the final stack; then stack.measured=graphs"
        yield Finding(at="knobs.graphs", problem=problem, advice=advice)
