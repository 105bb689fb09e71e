"""Lists the points around one layer at which the memory of a rank of our own engine may peak.

`peak.py` makes the tables of sizes (`layer_tables`) once per plan and asks for the `PeakPoint`s of each layer position.
A layer has up to four points: the end of its forward, a second forward that recompute runs, the backward of its
feed-forward part, and that of its mixer; under FSDP also the gathering and the reduction of its experts.

Mirrors `engine/models/decoder.py`, `engine/models/activation_memory.py`, `engine/autograd/recompute.py`,
`engine/models/block.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from threefold.cost.memory.stage_memory import Terms, add_terms
from threefold.cost.memory.threefold.activations import (
    gathered_input_bytes,
    late_recomputed_bytes,
    layer_activations,
    recomputed_activations,
    shared_expert_bytes,
)
from threefold.cost.memory.threefold.delayed_wgrad import (
    NO_WGRAD,
    WgradBytes,
    delayed_wgrad_bytes,
    dgrad_transients,
    mtp_projection_bytes,
)
from threefold.cost.memory.threefold.fsdp import (
    bytes_at_layer_points,
    expert_points,
    fsdp_units,
    quantized_expert_bytes,
    reduced_shard_bytes,
)
from threefold.cost.memory.threefold.graphs.pools import outside_transients
from threefold.cost.memory.threefold.local_sizes import LocalSizes, for_layer
from threefold.cost.memory.threefold.offloaded import NOTHING_OFFLOADED, OffloadedActivations
from threefold.cost.memory.threefold.peak_points import NO_LAYER, LayerPosition, PeakPoint
from threefold.cost.memory.threefold.timelines.moe_backward import (
    early_grad_rows,
    moe_backward_steps,
    recomputed_activation_bytes,
)
from threefold.cost.memory.threefold.transients import (
    ffn_backward_transients,
    forward_transients,
    freed_product_bytes,
    mixer_backward_transients,
    shared_backward_transients,
)
from threefold.cost.stage_contents import StageContents, chunk_layers, first_gradient_in
from threefold.cost.vision import NO_FEATURES, PlacedFeatures, placed_features
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer
from threefold.spec.params import layer_params, mixer_params

_FFN_TERMS = ("mlp", "router", "dispatch", "experts", "shared_experts")


@dataclass(frozen=True, slots=True)
class LayerTransients:
    """Bytes of a kind of layer on top of its saved activations."""

    forward: float  # at the end of its forward
    second_forward: float  # at the end of the forward that recompute runs
    ffn_backward: Terms  # in the backward of its feed-forward part, by module
    mixer_backward: float
    ffn_recomputed: float  # recomputed for the backward of its feed-forward part
    mixer_recomputed: float  # recomputed for the backward of its mixer
    saved_experts: float  # what its experts save without recompute


@dataclass(frozen=True, slots=True)
class LayerTables:
    """Bytes of each kind of layer of a plan, for one microbatch."""

    local: LocalSizes
    saved: dict[Layer, Terms]  # activations on the device
    offloaded: Mapping[Layer, OffloadedActivations]  # activations on the host
    wgrad: dict[Layer, WgradBytes]  # tensors for delayed weight gradients; zero where the schedule delays none
    transients: dict[Layer, LayerTransients]


def layer_tables(
    local: LocalSizes,
    saved: dict[Layer, Terms],
    offloaded: Mapping[Layer, OffloadedActivations],
    splits: bool,
    uses_graphs: bool = False,
) -> LayerTables:
    """The tables of a plan, from what its kinds of layers save on the device and on the host, for backwards that delay
    weight gradients (`splits`) or not. Where all passes use graphs, what these make lies in their pools."""
    wgrad = {layer: delayed_wgrad_bytes(local, layer) if splits else NO_WGRAD for layer in (*saved, NO_LAYER)}
    whole = {layer: add_terms((saved[layer], offloaded[layer].terms)) for layer in saved} | {NO_LAYER: {}}
    transients = {
        layer: _layer_transients(local, layer, terms, offloaded.get(layer, NOTHING_OFFLOADED), splits)
        for layer, terms in whole.items()
    }
    if uses_graphs:
        transients = {layer: _outside_graphs(local.plan, layer, each) for layer, each in transients.items()}
    return LayerTables(local, saved, offloaded, wgrad, transients)


def _layer_transients(
    local: LocalSizes, layer: Layer, saved: Terms, offloaded: OffloadedActivations, splits: bool
) -> LayerTransients:
    local, begins = for_layer(local, layer), first_gradient_in(layer)
    forward = forward_transients(local, layer, offloaded.ffn)
    if layer.ffn == "moe" and (begins == "none" or not _routed_have_gradients(local, layer)):
        forward += _unsaved_expert_bytes(local)
    if begins == "none":
        return LayerTransients(forward, forward, {layer.ffn: 0.0}, 0.0, 0.0, 0.0, 0.0)
    ffn, mixer = _recomputed_bytes(local, layer, saved)
    plain = layer_activations(local.without_recompute, layer)
    second = forward_transients(local, layer, offloaded.ffn, is_recompute=True)
    # Recompute of `moe`, or of a chunk of tokens by itself, makes no mixer's output.
    is_alone = "full" not in local.recompute or (layer.ffn == "moe" and local.expert_chunk_fraction < 1)
    return LayerTransients(
        forward=forward,
        second_forward=second + ffn - is_alone * local.residual_bytes,
        ffn_backward=_ffn_backward_steps(local, layer, splits),
        mixer_backward=mixer_backward_transients(local, layer) if begins == "input" else 0.0,
        ffn_recomputed=ffn,
        mixer_recomputed=mixer,
        saved_experts=plain.get("experts", 0.0),
    )


def _routed_have_gradients(local: LocalSizes, layer: Layer) -> bool:
    """Whether the routed experts of a layer are behind the first gradient, or have it."""
    return first_gradient_in(layer) != "ffn" or bool({"router", "expert_rows"} & local.saved_inputs)


def _unsaved_expert_bytes(local: LocalSizes) -> float:
    """FC1's output and FC2's input, which are there when experts without gradients run, although nothing saves them."""
    moe = local.model.moe
    assert moe is not None
    width = (1 + local.num_fc1) * moe.expert_dim / local.plan.layout.etp
    return local.element_bytes * width * local.expert_rows * local.expert_chunk_fraction


def _outside_graphs(plan: Plan, layer: Layer, sizes: LayerTransients) -> LayerTransients:
    """What is outside of graphs of the tensors that a layer holds for a moment."""
    mixer, ffn = outside_transients(plan, layer)
    if not mixer:
        sizes = replace(sizes, mixer_backward=0.0, mixer_recomputed=0.0)
    if not ffn:
        steps = dict.fromkeys(sizes.ffn_backward, 0.0)
        sizes = replace(sizes, forward=0.0, second_forward=0.0, ffn_backward=steps, ffn_recomputed=0.0)
    return sizes


def _ffn_backward_steps(local: LocalSizes, layer: Layer, splits: bool) -> Terms:
    if layer.ffn == "moe" and not _routed_have_gradients(local, layer):
        return {layer.ffn: shared_backward_transients(local)}
    if layer.ffn == "moe":
        shared_wgrad = delayed_wgrad_bytes(local, layer).dense if splits else 0.0
        return moe_backward_steps(local, splits, shared_wgrad=shared_wgrad)
    if splits and layer.ffn == "dense":
        return {layer.ffn: dgrad_transients(local, layer)}
    return {layer.ffn: ffn_backward_transients(local, layer)}


def _recomputed_bytes(local: LocalSizes, layer: Layer, saved: Terms) -> tuple[float, float]:
    """Bytes that are recomputed for the backward of a layer's feed-forward part, and of its mixer."""
    if not local.recompute:
        return 0.0, 0.0
    made = recomputed_activations(local, layer, local.without_recompute)
    ffn = sum(made.get(name, 0.0) - saved.get(name, 0.0) for name in _FFN_TERMS)
    mixer = made.get("attention", 0.0) - saved.get("attention", 0.0)
    row = local.residual_bytes
    if "full" in local.recompute:
        norms = made["norms"] - saved.get("norms", 0.0)
        return ffn + mixer + norms - late_recomputed_bytes(local, layer, local.without_recompute), mixer + row
    if "layernorm" not in local.recompute:
        return ffn, mixer
    gathered = gathered_input_bytes(local.without_recompute, "mlp") if "mlp" not in local.recompute else 0.0
    ffn -= gathered if layer.ffn == "dense" else 0.0
    return ffn + (row if _recomputes_norm_first(local, layer) else 0.0), mixer + row


def _recomputes_norm_first(local: LocalSizes, layer: Layer) -> bool:
    """Whether the backward of the feed-forward part begins with the recompute of its norm. The norm's output is
    recomputed when the first GEMMs have their backward: shared experts that run last come first, others last."""
    if "layernorm" not in local.recompute:
        return False
    moe = local.model.moe
    has_shared = layer.ffn == "moe" and moe is not None and bool(moe.shared_width)
    has_shared = has_shared and not local.plan.knobs.shared_expert_overlap
    return has_shared or {"dense": "mlp", "moe": "moe"}.get(layer.ffn) in local.recompute


def layer_points(
    tables: LayerTables, contents: StageContents, chunk: Chunk, position: LayerPosition
) -> list[PeakPoint]:
    """The points of the passes at one layer of a chunk."""
    layer, sizes = position.layer, tables.transients[position.layer]
    freed = add_terms([position.freed(tables.saved), _freed_at_ends(tables.local, chunk, position)])
    local = for_layer(tables.local, layer)
    together = _recomputed_before(local, chunk, position)
    added = _added_at_layer(local, layer, sizes, tables.saved.get(layer, {}))
    points = []
    if local.plan.knobs.data_parallel != "zero1":
        # A previous layer that was recomputed together with this one is gathered already.
        at = replace(position, previous_layer=None) if together else position
        units = fsdp_units(local.plan, contents, at)
        more = bytes_at_layer_points(local, units)
        points = expert_points(local, units, position, sizes.saved_experts, sizes.ffn_recomputed, freed)
    else:
        # MTP's part of the embedding table's gradient waits for the rest.
        table = local.element_bytes * local.model.vocab / local.tp * local.model.dim
        waits = position.is_before_mtp and chunk.embedding
        more = dict.fromkeys(added, table if waits else 0.0) | {"a forward": 0.0}
    pending = sum(tables.wgrad[each].total for each in position.later_layers)
    if pending and position.is_before_mtp:
        pending += mtp_projection_bytes(local, chunk)
    more = {name: size + (0.0 if name == "a forward" else pending) for name, size in more.items()}
    if "a mixer's backward" in added:
        more["a mixer's backward"] += tables.wgrad[layer].ffn
    offloaded = tables.offloaded.get(layer, NOTHING_OFFLOADED)
    ffn_freed = add_terms([freed, _saved_behind_mixer(local, tables.saved.get(layer, {}), offloaded)])
    for name, size in added.items():
        size["workspace"] = size.get("workspace", 0.0) + more[name]
        if name == "a forward":
            points.append(PeakPoint(name, "forward", size, freed))
        else:
            over = ffn_freed if name == "a mixer's backward" else freed
            done = position.done_fraction
            if name == "a mixer's backward" and not tables.wgrad[layer].total:
                done = max(done, _done_before_mixer(local, chunk, position))
            points.append(PeakPoint(name, "backward", size, over, done, after_head=True))
    features, number = chunk_features(local.plan, chunk), len(chunk_layers(local.plan, chunk)) - 1
    waiting = features.gradients(number - len(position.later_layers))
    others = _recomputed_together(local, contents, position, together)
    back = _back_from_host(local, chunk, position, tables.offloaded, sizes.ffn_backward)
    for number, point in enumerate(points):
        if point.pass_name == "forward":
            point.added["workspace"] = point.added.get("workspace", 0.0) + features.in_forward
        if point.pass_name == "backward":
            experts_of = layer if point.name == "a mixer's backward" else NO_LAYER
            reduced = reduced_shard_bytes(local, chunk, position.later_layers, experts_of)
            points[number] = replace(point, reduced_shards=reduced)
            held = back.get(point.name, 0.0) + _tied_gradient(local, chunk, position) + waiting
            for name, num_bytes in (*others.items(), ("workspace", held)):
                point.added[name] = point.added.get(name, 0.0) + num_bytes
    return points


def chunk_features(plan: Plan, chunk: Chunk) -> PlacedFeatures:
    """The features of pictures in the passes of a chunk."""
    return placed_features(plan, plan.chunks.index(chunk)) if plan.is_vlm else NO_FEATURES


def _done_before_mixer(local: LocalSizes, chunk: Chunk, position: LayerPosition) -> float:
    """The fraction of a chunk's gradients, without the output layer's, that are there in the backward of a layer's
    mixer: those of its feed-forward part too. FSDP reduces them meanwhile."""
    if local.plan.knobs.data_parallel != "zero1":
        return 0.0
    model, layers = local.model, chunk_layers(local.plan, chunk)
    ffn = layer_params(model, position.layer) - mixer_params(model, position.layer)
    done = ffn + sum(layer_params(model, layer) for layer in position.later_layers)
    table = model.vocab * model.dim if chunk.embedding and not model.tied else 0
    return done / max(1, table + sum(layer_params(model, layer) for layer in layers))


def _tied_gradient(local: LocalSizes, chunk: Chunk, position: LayerPosition) -> float:
    """The output layer's gradient of a table that is the embedding's too: it waits for the gradient of the latter."""
    is_counted = position.is_before_mtp and local.plan.knobs.data_parallel == "zero1"
    if not (local.model.tied and chunk.embedding and chunk.loss and "head" in local.saved_inputs) or is_counted:
        return 0.0
    return local.element_bytes * local.model.vocab / local.tp * local.model.dim


def _added_at_layer(local: LocalSizes, layer: Layer, sizes: LayerTransients, saved: Terms) -> dict[str, Terms]:
    """Bytes on top of saved activations at the points of a layer, by the point's name."""
    added: dict[str, Terms] = {
        "a forward": {"workspace": sizes.forward},
        "a backward": {"workspace": max(sizes.ffn_backward.values()), "recompute": sizes.ffn_recomputed},
    }
    if layer.ffn == "dense":
        product = freed_product_bytes(local)
        saved_product = min(product, saved.get("mlp", 0.0))
        recomputed = min(product - saved_product, sizes.ffn_recomputed)
        added["a backward"]["workspace"] += saved_product + recomputed
        added["a backward"]["recompute"] -= recomputed
        added["a backward"]["mlp"] = -saved_product
    if layer.ffn == "moe":
        # An activation that is recomputed by itself is a tensor of the experts' backward. Shared experts that run last
        # have had theirs before it.
        moved = min(sizes.ffn_recomputed, recomputed_activation_bytes(local))
        is_before = not local.plan.knobs.shared_expert_overlap and _routed_have_gradients(local, layer)
        gone = shared_expert_bytes(local.without_recompute) * local.expert_chunk_fraction * is_before
        saved_there = min(gone, saved.get("shared_experts", 0.0))
        added["a backward"]["recompute"] -= moved + gone - saved_there
        added["a backward"]["workspace"] += moved + gone
        added["a backward"]["shared_experts"] = -saved_there
    if layer.ffn == "moe" and local.recompute & {"moe", "full"}:
        row = local.residual_bytes
        added["a second forward"] = {"workspace": row + early_grad_rows(local), "recompute": sizes.second_forward}
    if layer.ffn == "dense" and local.quantized_bytes and local.recompute & {"mlp", "full"}:
        # The activated product, the same quantized for the last GEMM, and its result.
        width = local.model.dense_dim / local.tp * local.gathered_tokens * local.mlp_chunk_fraction
        product = (local.element_bytes + local.quantized_bytes) * width
        row = local.element_bytes * local.model.dim
        made = sizes.ffn_recomputed + product + row * local.gathered_tokens * local.mlp_chunk_fraction
        gradients = row * (local.tokens + (local.gathered_tokens if local.gathers_sequence else 0))
        added["a second forward"] = {"workspace": gradients, "recompute": made}
    if _recomputes_norm_first(local, layer) and "full" not in local.recompute:  # its output is where it was
        row = min(local.element_bytes * local.model.dim * local.tokens, added["a backward"]["recompute"])
        added["a backward"]["recompute"] -= row
        added["a backward"]["norms"] = row
    if layer.mixer != "none":
        added["a mixer's backward"] = {"workspace": sizes.mixer_backward, "recompute": sizes.mixer_recomputed}
    return added


def _back_from_host(
    local: LocalSizes,
    chunk: Chunk,
    position: LayerPosition,
    offloaded: Mapping[Layer, OffloadedActivations],
    ffn_steps: Terms,
) -> Terms:
    """Offloaded tensors that are back on the device at each point of a layer, by the point's name. All tensors of a
    layer come back when the first one is needed, and those of the layer before it with them."""
    next_layer, previous_layer = _neighbors(local.plan, chunk, position)
    this = offloaded.get(position.layer, NOTHING_OFFLOADED)
    received = this.received_input_bytes(local, chunk) if position.previous_layer is None else 0.0
    all_of_this, previous = this.total - received, 0.0
    if previous_layer:
        is_first = len(position.later_layers) == len(chunk_layers(local.plan, chunk)) - 2
        of_previous = offloaded[previous_layer]
        previous = of_previous.total - (of_previous.received_input_bytes(local, chunk) if is_first else 0.0)
    came_early = next_layer is not None and offloaded[next_layer].total > 0
    before, most = all_of_this if came_early else 0.0, 0.0
    needed = "mlp_norm" in this.modules and _recomputes_norm_first(local, position.layer)
    needed = needed or ("full" in local.recompute and bool(this.modules))  # by the second forward
    needed_first = needed
    for name, size in ffn_steps.items():
        needed = needed or name in this.modules
        most = max(most, size + (all_of_this + previous if needed else before))
    mixer = sum(this.mixer.values()) - received if came_early or this.is_needed_by_attention else 0.0
    return {
        "a gathering": before,
        "a second forward": all_of_this + previous if this.is_whole_layer or needed_first else before,
        "a backward": most - max(ffn_steps.values()),
        "a reduction": all_of_this + previous if needed else before,
        "a mixer's backward": mixer + (previous if this.is_needed_by_attention else 0.0),
    }


def _neighbors(plan: Plan, chunk: Chunk, position: LayerPosition) -> tuple[Layer | None, Layer | None]:
    """The next and the previous layer, if they are offloaded in one sequence with this one: the chunk's decoder layers,
    or those of one MTP depth."""
    number, num_layers = len(chunk_layers(plan, chunk)) - len(position.later_layers) - 1, len(chunk.layers)
    size = num_layers if number < num_layers else len(plan.model.mtp_depth)
    at = number if number < num_layers else (number - num_layers) % size
    return position.later_layers[0] if at < size - 1 else None, position.previous_layer if at > 0 else None


def _recomputed_before(local: LocalSizes, chunk: Chunk, position: LayerPosition) -> tuple[Layer, ...]:
    """Layers before this one that full recompute recomputes together with it."""
    layers, unit = chunk_layers(local.plan, chunk), local.layers_per_recompute
    number = len(layers) - len(position.later_layers) - 1
    return layers[number - number % unit : number] if number < len(chunk.layers) else ()


def _recomputed_together(
    local: LocalSizes, contents: StageContents, position: LayerPosition, layers: Sequence[Layer]
) -> Terms:
    """What was recomputed of `layers`, and under FSDP their weights, which stay gathered until their backward."""
    if not layers:
        return {}
    made, gathered = sum(sum(layer_activations(local.without_recompute, layer).values()) for layer in layers), 0.0
    if local.plan.knobs.data_parallel != "zero1":
        for layer in layers:
            units = fsdp_units(local.plan, contents, replace(position, layer=layer))
            weights = local.element_bytes * (units.layer + units.padded_experts)
            gathered += weights + quantized_expert_bytes(local, units)
    return {"recompute": made, "workspace": gathered}


def _freed_at_ends(local: LocalSizes, chunk: Chunk, position: LayerPosition) -> Terms:
    """What the last norm and multi-token prediction save, which is freed when the backward is at a decoder layer."""
    if chunk.mtp and not position.is_before_mtp:
        return {}
    row = local.residual_bytes
    return {"norms": row * (chunk.loss + 4 * chunk.mtp), "embedding": row * chunk.mtp}


def _saved_behind_mixer(local: LocalSizes, saved: Terms, offloaded: OffloadedActivations) -> Terms:
    """What a layer's feed-forward part and its norm keep on the device."""
    ffn = {name: size for name, size in saved.items() if name in _FFN_TERMS}
    norms = saved.get("norms", 0.0) + offloaded.terms.get("norms", 0.0)
    return ffn if "full" in local.recompute else ffn | {"norms": norms / 2 - offloaded.ffn.get("norms", 0.0)}
