"""Memory that the CUDA graphs of our own engine hold: the term `graphs` of a stage.

Graphs keep what their scopes save for the backward, copies of inputs and output gradients that no graph writes, what
the backward of one layer makes on top, and, unless weight gradients are accumulated where they are summed, those of
their parameters. They keep it for the whole run, once for each microbatch in flight. `model.py` therefore takes the
activations inside of graphs out of the terms of their layers (`outside_graphs`) and adds `graph_pools`. The rule
`graphs-fit-their-budget` compares `largest_pool` with the plan. `docs/log/graphs.md` holds them against a GPU.

Mirrors `engine/graphs/graphed_function.py`, `engine/graphs/graphed_part.py`, `engine/graphs/graph_slot.py`,
`engine/graphs/scopes.py`, `engine/graphs/full_iteration.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from threefold.cost.local_parameters import trained_parameters
from threefold.cost.memory.stage_memory import Terms, layer_kinds
from threefold.cost.memory.threefold.activations import (
    ffn_norm_bytes,
    layer_activations,
    mixer_bytes,
    recomputed_activations,
)
from threefold.cost.memory.threefold.graphs.layer_pool import layer_pool_bytes, simulated_parts
from threefold.cost.memory.threefold.local_sizes import FP32, LocalSizes, for_layer
from threefold.cost.memory.threefold.schedule import schedule_moments
from threefold.cost.memory.threefold.timelines.optimizer_step import rank_parameters
from threefold.cost.memory.threefold.transients import ffn_backward_transients, mixer_backward_transients
from threefold.cost.rank_params import stage_params
from threefold.cost.stage_contents import StageContents, chunk_layers, stage_contents
from threefold.cost.trained_weights import is_partly_frozen, trained_share
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, Layer
from threefold.spec.params import dense_params, expert_params, mixer_params, router_params, shared_params
from threefold.units import GIB

WHOLE = "full_iteration"
# Memory terms of what a scope saves for the backward.
_SAVED_TERMS = {
    "attn": ("attention",),
    "mlp": ("mlp",),
    "moe_router": ("router",),
    "moe": ("router", "dispatch", "experts", "shared_experts"),
}


def has_graphs(plan: Plan) -> bool:
    """Whether our engine would record graphs for the plan."""
    return bool(plan.knobs.graphs) and plan.chip.architecture != "cpu" and plan.knobs.data_parallel == "zero1"


@dataclass(frozen=True, slots=True)
class GraphPools:
    """The graphs of a pipeline rank, if there were no budget."""

    num_bytes: float
    num_slots: int  # microbatches in flight with graphs of their own, over all chunks


def graph_pools(plan: Plan, stage: int, contents: StageContents, saved: Mapping[Layer, Terms]) -> GraphPools:
    if not has_graphs(plan):
        return GraphPools(0.0, 0)
    scopes, local = set(plan.knobs.graphs), LocalSizes(plan, 1.0)
    if WHOLE in scopes:
        own = [layer for chunk in contents.chunks for layer in chunk_layers(plan, chunk)[: len(chunk.layers)]]
        activations = sum(sum(saved[layer].values()) for layer in own)
        grads = 0.0 if local.fuses_grad_accumulation else local.element_bytes * _trained_params(plan, contents)
        # On one rank the graph of later microbatches adds to these: those of one layer and one table exist twice.
        adds = grads and plan.layout.gpus == 1 and plan.num_microbatches > 1
        return GraphPools(activations + grads + (_largest_gradients(local, contents) if adds else 0.0), 1)
    held, most = 0.0, _most_in_flight(plan, stage, len(contents.chunks))
    for chunk, slots in zip(contents.chunks, most, strict=False):
        layers = chunk_layers(plan, chunk)
        static = _copied_bytes(local, scopes, layers)
        others = [_other_scopes(scopes, layer) for layer in layers]
        kept = made = grads = 0.0
        for layer, rest in zip(layers, others, strict=True):
            kept += sum(_inside(local, rest, layer, saved[layer]).values()) + _unsaved_output(local, rest, layer)
            grads += _gradient_bytes(local, rest, layer)
            made = max(made, _backward_bytes(local, rest, layer))
        made += _input_gradients(local, scopes - {"moe"}, layers)
        experts = max((_parameter_grads(local, scopes & {"moe"}, layer) for layer in layers), default=0.0)
        held += slots * (kept + static + grads + made + layer_pool_bytes(local, scopes, layers, experts))
    return GraphPools(held, sum(most))


def _largest_gradients(local: LocalSizes, contents: StageContents) -> float:
    """Gradients of the experts of one layer and of one table of the vocabulary."""
    model = local.model
    has_experts = model.moe is not None and any(layer.ffn == "moe" for layer in contents.layers)
    experts = expert_params(model) * model.moe.num_experts if has_experts and model.moe is not None else 0.0
    return local.element_bytes * (experts + model.vocab * model.dim)


def graphed_fraction(plan: Plan, pools: GraphPools) -> float:
    """The part of the microbatches in flight that the budget has graphs for. The others run eagerly."""
    budget = plan.knobs.graph_memory_gb
    if budget is None or budget * GIB >= pools.num_bytes:
        return 1.0
    # The first is recorded whatever it needs: its size is known only then.
    return max(1, int(budget * GIB * pools.num_slots / pools.num_bytes)) / pools.num_slots


def outside_graphs(plan: Plan, saved: Mapping[Layer, Terms], fraction: float) -> dict[Layer, Terms]:
    """What layers save for the backward outside of graphs, which hold this fraction of the microbatches in flight."""
    scopes, local, outside = set(plan.knobs.graphs), LocalSizes(plan, 1.0), {}
    for layer, terms in saved.items():
        inside = _inside(local, scopes, layer, terms)
        outside[layer] = {name: size - fraction * inside.get(name, 0.0) for name, size in terms.items()}
    return outside


def outside_transients(plan: Plan, layer: Layer) -> tuple[bool, bool]:
    """Whether tensors that the mixer, and the feed-forward part, of a layer hold for a moment are outside of graphs."""
    found = _scopes_of(set(plan.knobs.graphs), layer) if has_graphs(plan) else set()
    return "attn" not in found, not found & {"mlp", "moe"}


def num_inputs_in_graphs(plan: Plan, layers: Sequence[Layer]) -> int:
    """Layers of a chunk whose input, which the norm before an eager mixer saves, is the result of a graph."""
    outside = [outside_transients(plan, layer) for layer in layers]
    return sum(is_eager and not before[1] for before, (is_eager, _) in pairwise(outside))


def gradients_in_graphs(plan: Plan, contents: StageContents) -> float:
    """Gradients of a step that stay where graphs write them: those of the only microbatch of one rank."""
    if not has_graphs(plan) or plan.layout.gpus > 1 or (plan.num_microbatches > 1 and WHOLE not in plan.knobs.graphs):
        return 0.0
    local, scopes = LocalSizes(plan, 1.0), set(plan.knobs.graphs)
    if WHOLE in scopes:
        return 0.0 if local.accumulates_wider else local.element_bytes * _trained_params(plan, contents)
    return sum(_parameter_grads(local, scopes, layer) for layer in contents.layers)


def _trained_params(plan: Plan, contents: StageContents) -> float:
    """Parameters of a rank that have gradients."""
    if not is_partly_frozen(plan):
        return sum(stage_params(plan, contents))
    return sum(one.elements for one in trained_parameters(rank_parameters(plan, contents)))


def largest_pool(plan: Plan) -> float:
    """Bytes that the graphs of the fullest rank would hold if there were no budget."""
    local, most = LocalSizes(plan, 1.0), 0.0
    saved = {layer: layer_activations(for_layer(local, layer), layer) for layer in layer_kinds(plan)}
    for stage, contents in enumerate(stage_contents(plan)):
        most = max(most, graph_pools(plan, stage, contents, saved).num_bytes)
    return most


def _most_in_flight(plan: Plan, stage: int, num_chunks: int) -> list[int]:
    """Microbatches of each chunk that are in flight at once, or whose weight gradients are still to come."""
    if plan.layout.pp == 1:
        return [min(plan.num_microbatches, 2 if plan.knobs.ep_overlap else 1)] * num_chunks
    most = [1] * num_chunks
    for moment in schedule_moments(plan, stage):
        pairs = zip(moment.in_flight, moment.pending_wgrad, strict=False)
        most = [max(known, sum(both)) for known, both in zip(most, pairs, strict=False)]
    return most


def _scopes_of(scopes: set[str], layer: Layer) -> set[str]:
    """The scopes that record something of this layer."""
    found = {"attn"} if layer.mixer not in ("none", "mamba") else set()
    found |= {"mlp"} if layer.ffn == "dense" else {"moe", "moe_router"} if layer.ffn == "moe" else set()
    return found & scopes


def _other_scopes(scopes: set[str], layer: Layer) -> set[str]:
    """The scopes of a layer whose pools are counted here, and not gone through block by block."""
    parts = simulated_parts(scopes, layer)
    return scopes - ({"moe"} if "moe" in parts else set()) - ({"attn"} if "mixer" in parts else set())


def _inside(local: LocalSizes, scopes: set[str], layer: Layer, saved: Terms) -> Terms:
    """What lies in graphs of the tensors that a layer saves, by memory term. A scope has the norm before its module."""
    found = _scopes_of(scopes, layer)
    inside = {name: saved.get(name, 0.0) for scope in found for name in _SAVED_TERMS[scope]}
    of_ffn = min(ffn_norm_bytes(for_layer(local, layer), layer), saved.get("norms", 0.0))
    inside["norms"] = of_ffn if found - {"attn"} else 0.0
    inside["norms"] += saved.get("norms", 0.0) - of_ffn if "attn" in found else 0.0
    return inside


def _unsaved_output(local: LocalSizes, scopes: set[str], layer: Layer) -> float:
    """The output of the norm before a router, which its graph hands to experts, where no frozen weight has it saved."""
    row = local.element_bytes * local.model.dim * local.tokens
    if "moe_router" not in _scopes_of(scopes, layer) or ffn_norm_bytes(for_layer(local, layer), layer) > 1.5 * row:
        return 0.0
    return row


def _copied_bytes(local: LocalSizes, scopes: set[str], layers: Sequence[Layer]) -> float:
    """Copies of inputs and output gradients that lie outside the graphs, for the layers of a chunk."""
    num_rows, follows_graph = 0, False
    for layer in layers:
        found = _scopes_of(scopes, layer)
        has_ffn = bool(found & {"moe", "mlp"})
        if "attn" in found and has_ffn:
            # The next graph reads what this one writes; so the first input and the last gradient remain.
            num_rows += 0 if follows_graph else 2
        elif found:
            # The mixer's input, or what the router reads; then the gradients of both outputs.
            num_rows += (1 if "attn" in found else 2) + (1 if has_ffn else 2)
        follows_graph = "attn" in found and has_ffn
    return num_rows * local.element_bytes * local.model.dim * local.tokens


def _backward_bytes(local: LocalSizes, scopes: set[str], layer: Layer) -> float:
    """What the backward of a layer makes on top of its saved tensors. The next layer uses the memory again; mixer and
    feed-forward part have tensors of other sizes, for which blocks of their own are taken."""
    found, local = _scopes_of(scopes, layer), for_layer(local, layer)
    mixer = mixer_backward_transients(local, layer) + _quantized_bytes(local, layer) if "attn" in found else 0.0
    mixer += _sink_bytes(local, layer) if {"attn", "moe_router"} <= found else 0.0
    mixer += _adapter_gradients(local, found, layer) if "attn" in found else 0.0
    mlp = ffn_backward_transients(local, layer) if "mlp" in found else 0.0
    if local.recompute:  # what is recomputed is recorded with the backward
        plain = local.without_recompute
        mixer += mixer_bytes(plain, layer) - mixer_bytes(local, layer) if "attn" in found else 0.0
        is_made = "mlp" in found and "mlp" in local.recompute
        mlp += recomputed_activations(local, layer, plain).get("mlp", 0.0) if is_made else 0.0
    return mixer + mlp


def _input_gradients(local: LocalSizes, scopes: set[str], layers: Sequence[Layer]) -> float:
    """Gradients of the inputs of graphs, each of which stays where its graph writes it, and the router's part of one.
    Those of graphs with mixers lie where saved tensors of their size were."""
    found = [_scopes_of(scopes, layer) for layer in layers]
    if any("attn" in each for each in found) or not any(found):
        return 0.0
    return local.element_bytes * local.model.dim * local.tokens * (1 + sum(map(bool, found)))


def _adapter_gradients(local: LocalSizes, found: set[str], layer: Layer) -> float:
    """Gradients from the adapter of the output projection, which are added to those of its frozen weight, and in a
    graph with the router its part of the gradient of the residual stream: none fits where saved tensors were."""
    spec = local.model.attention_of(layer)
    if not local.has_adapters or "attention" not in local.plan.job.lora_targets or spec is None:
        return 0.0
    values = spec.q_dim if isinstance(spec, GqaSpec) else spec.num_heads * spec.v_dim
    of_router = local.model.dim * local.tokens if "moe_router" in found else 0.0
    return local.element_bytes * (values / local.tp * local.gathered_tokens + of_router)


def _sink_bytes(local: LocalSizes, layer: Layer) -> float:
    """One tensor in fp32. Gradients of attention sinks are computed from three of them. Two fit into memory that the
    attention kernel has freed, and the third would fit only where the router's tensors lie."""
    spec = local.model.attention_of(layer)
    if not isinstance(spec, GqaSpec) or not spec.sinks:
        return 0.0
    return FP32 * spec.q_dim / local.tp * local.gathered_tokens


def _quantized_bytes(local: LocalSizes, layer: Layer) -> float:
    """What a mixer's GEMMs quantize and do not save: inputs of the first and of the output projection along rows, and
    the first one's gradient along rows and columns."""
    spec = local.model.attention_of(layer)
    if spec is None:
        return 0.0
    if isinstance(spec, GqaSpec):
        projected, values = spec.q_dim + 2 * spec.kv_dim, spec.q_dim
    else:
        projected, values = spec.num_heads * spec.qk_dim, spec.num_heads * spec.v_dim
    width = local.model.dim + (values + 2 * projected) / local.tp
    return local.quantized_bytes * width * local.gathered_tokens


def _parameter_grads(local: LocalSizes, scopes: set[str], layer: Layer) -> float:
    """Gradients of the parameters inside of graphs; fused accumulation adds them to the main gradients there."""
    found, model, layout = _scopes_of(scopes, layer), local.model, local.plan.layout
    if local.fuses_grad_accumulation:
        return 0.0
    trained = {name: trained_share(local.plan, name) for name in ("mixer", "mlp", "experts", "shared_experts")}
    params = trained["mixer"] * mixer_params(model, layer) / layout.tp if "attn" in found else 0.0
    params += router_params(model) if found & {"moe", "moe_router"} and "router" in local.saved_inputs else 0.0
    params += trained["mlp"] * dense_params(model) / layout.tp if "mlp" in found else 0.0
    if "moe" in found and model.moe is not None:
        experts = expert_params(model) * model.moe.num_experts / (layout.ep * layout.etp)
        params += trained["experts"] * experts + trained["shared_experts"] * shared_params(model)
    return local.element_bytes * params


def _gradient_bytes(local: LocalSizes, scopes: set[str], layer: Layer) -> float:
    """The same as far as it makes a pool larger: a gradient of no more rows than there are tokens lies where an
    activation was, those of experts need blocks of their own."""
    if local.gathered_tokens < local.model.dim:
        return _parameter_grads(local, scopes, layer)
    return 0.0
