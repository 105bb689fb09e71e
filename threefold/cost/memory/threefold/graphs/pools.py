"""Memory that the CUDA graphs of our own engine hold, and how much of it a run without graphs would not hold.

Graphs keep what their scopes save for the backward, copies of inputs and output gradients that no graph writes, and,
unless weight gradients are accumulated where they are summed, the gradients of their parameters: once for each
microbatch in flight. Saved activations are there without graphs too, but only while their microbatch is in flight.
`model.py` adds `GraphPools.added_bytes` to the peak of a stage, and the rule `graphs-fit-their-budget`
compares `GraphPools.held_bytes` with the plan. `docs/log/graphs.md` holds them against a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.activations import layer_activations
from threefold.cost.memory.threefold.local_sizes import LocalSizes, for_layer
from threefold.cost.memory.threefold.schedule import schedule_moments
from threefold.cost.rank_params import stage_params
from threefold.cost.stage_contents import StageContents, chunk_layers, stage_contents
from threefold.plan.plan import Plan
from threefold.spec.model import Layer
from threefold.spec.params import dense_params, expert_params, mixer_params, router_params, shared_params
from threefold.units import GIB

# Memory terms of what a scope saves for the backward.
_SAVED_TERMS = {
    "attn": ("attention", "norms"),
    "mlp": ("mlp", "norms"),
    "moe_router": ("router", "norms"),
    "moe": ("router", "dispatch", "experts", "shared_experts", "norms"),
}


@dataclass(frozen=True, slots=True)
class GraphPools:
    """Bytes of the graphs of one pipeline rank."""

    held_bytes: float
    added_bytes: float


NO_POOLS = GraphPools(0.0, 0.0)


def graph_pools(
    plan: Plan, stage: int, contents: StageContents, saved: Mapping[Layer, Terms], in_flight: Sequence[int]
) -> GraphPools:
    """The graphs of a rank, at a moment with so many microbatches of each chunk in flight."""
    scopes = set(plan.knobs.graphs)
    if not scopes or plan.chip.architecture == "cpu" or plan.knobs.data_parallel != "zero1":
        return NO_POOLS
    local = LocalSizes(plan, 1.0)
    if "full_iteration" in scopes:
        activations = sum(sum(saved[layer].values()) for layer in contents.layers)
        grads = 0.0 if local.fuses_grad_accumulation else local.element_bytes * sum(stage_params(plan, contents))
        # Where gradients are accumulated elsewhere, those of a microbatch exist beside the sum.
        return GraphPools(activations + grads, grads if plan.layout.gpus > 1 or local.accumulates_wider else 0.0)
    # The gradients of a step's only microbatch stay where the graph wrote them, and cost nothing.
    accumulates = plan.layout.gpus > 1 or plan.num_microbatches > 1
    held = added = 0.0
    most = _most_in_flight(plan, stage, len(contents.chunks))
    for chunk, count, slots in zip(contents.chunks, in_flight, most, strict=False):
        layers = chunk_layers(plan, chunk)
        kept = sum(_saved_bytes(scopes, layer, saved[layer]) for layer in layers)
        static = sum(_copied_bytes(local, scopes, layer) for layer in layers)
        grads = sum(_gradient_bytes(local, scopes, layer) for layer in layers)
        held += slots * (kept + static + grads)
        added += slots * (static + grads * accumulates) + max(0, slots - count) * kept
    # Microbatches for which the budget has no slot run eagerly.
    budget = plan.knobs.graph_memory_gb
    fraction = 1.0 if budget is None or not held else min(1.0, budget * GIB / held)
    return GraphPools(held, fraction * added)


def largest_pool(plan: Plan) -> float:
    """Bytes that the graphs of the fullest rank hold."""
    local, most = LocalSizes(plan, 1.0), 0.0
    for stage, contents in enumerate(stage_contents(plan)):
        saved = {layer: layer_activations(for_layer(local, layer), layer) for layer in contents.layers}
        most = max(most, graph_pools(plan, stage, contents, saved, [0] * len(contents.chunks)).held_bytes)
    return most


def _most_in_flight(plan: Plan, stage: int, num_chunks: int) -> list[int]:
    """Microbatches of each chunk that are in flight at once, or whose weight gradients are still to come."""
    if plan.layout.pp == 1:
        return [2 if plan.knobs.ep_overlap else 1] * num_chunks
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


def _saved_bytes(scopes: set[str], layer: Layer, saved: Terms) -> float:
    names = {name for scope in _scopes_of(scopes, layer) for name in _SAVED_TERMS[scope]}
    return sum(saved.get(name, 0.0) for name in names)


def _copied_bytes(local: LocalSizes, scopes: set[str], layer: Layer) -> float:
    """Copies of inputs and output gradients that lie outside the graphs."""
    found = _scopes_of(scopes, layer)
    if not found:
        return 0.0
    # The mixer's input, or what the router reads; then the gradients of the residual stream and of the other output.
    num_rows = (1 if "attn" in found else 2) + (1 if found & {"moe", "mlp"} else 2)
    return num_rows * local.element_bytes * local.model.dim * local.tokens


def _gradient_bytes(local: LocalSizes, scopes: set[str], layer: Layer) -> float:
    """Gradients of parameters; fused accumulation adds them to the main gradients inside the graph."""
    found, model, layout = _scopes_of(scopes, layer), local.model, local.plan.layout
    if local.fuses_grad_accumulation:
        return 0.0
    params = mixer_params(model, layer) / layout.tp if "attn" in found else 0.0
    params += router_params(model) if found & {"moe", "moe_router"} else 0.0
    params += dense_params(model) / layout.tp if "mlp" in found else 0.0
    if "moe" in found and model.moe is not None:
        params += expert_params(model) * model.moe.num_experts / (layout.ep * layout.etp) + shared_params(model)
    return local.element_bytes * params
