"""FSDP in our own engine: bytes at the points where weights are gathered and gradients are reduced.

FSDP units are a layer's experts, the rest of the layer, and the parameters of a chunk outside its layers (the root
unit: the vocabulary's tables). A unit is all-gathered into one buffer and copied out of it. In a forward the buffer is
freed when the next unit is copied; in a backward at once, while the next unit's buffer is already being filled. The
input of a reduce-scatter is freed when the next one begins.

torch's `fully_shard` splits the first dimension of each weight: with more ranks than experts most shards are padding.

Mirrors `engine/data_parallel/fsdp.py`, `engine/shard/order.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.local_sizes import FP32, LocalSizes
from threefold.cost.memory.threefold.peak_points import NO_LAYER, LayerPosition, PeakPoint, at_chunk_end
from threefold.cost.memory.threefold.timelines.moe_backward import early_grad_rows
from threefold.cost.memory.threefold.timelines.moe_forward import experts_peak
from threefold.cost.memory.threefold.transients import embedding_transients
from threefold.cost.stage_contents import StageContents, chunk_layers, stage_contents
from threefold.cost.vision import vision_saved_bytes
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer, MlaSpec
from threefold.spec.params import dense_params, expert_params, mixer_params, norm_params, router_params, shared_params


@dataclass(frozen=True)
class FsdpUnits:
    """Elements of the gathered units around a layer; 0 where a unit is not sharded."""

    root: float
    loss_root: float  # the part of the root that is reduced right after the loss
    layer: float  # the layer without its routed experts
    experts: float
    padded_experts: float  # the experts with padding, so that all shards are equal
    expert_shards: int
    shards: int = 1  # shards of the other units
    previous: float = 0.0  # the unit that is gathered next in the backward, of the layer before this one
    last_reduced: float = 0.0  # the unit that was reduced last before this layer's backward
    after_core: float = 0.0  # weights after the core of the mixer, whose gradients wait for the rest of the unit
    mtp_root: float = 0.0  # root weights whose gradients MTP has made, which wait for the rest of the root


def num_local_experts(plan: Plan) -> int:
    """Routed experts of a rank."""
    return max(1, plan.model.num_experts // plan.layout.ep)


def expert_shards(plan: Plan, num_ranks: int) -> float:
    """Local experts over those that the first of so many ranks holds: a shard is of whole experts, and the last ranks
    may hold fewer, or none."""
    number = num_local_experts(plan)
    return number / -(-number // max(1, num_ranks))


def only_chunk(chunk: Chunk) -> StageContents:
    """A chunk as if its rank held no other."""
    return StageContents((chunk,), (), chunk.embedding, chunk.mtp, chunk.loss)


def fsdp_units(plan: Plan, contents: StageContents, position: LayerPosition) -> FsdpUnits:
    """The units around a layer, as its backward meets them."""
    depths = min(contents.mtp, 1) if plan.model.mtp_shared else contents.mtp
    unsharded = num_unsharded_tables(plan, contents)
    units = _layer_units(plan, position.layer, num_vocab_tables(plan, contents) - unsharded, depths)
    loss_root = units.loss_root if contents.loss else 0.0
    next_layer = position.later_layers[0] if position.later_layers else None
    table = plan.model.vocab / plan.layout.tp * plan.model.dim
    for chunk in contents.chunks:  # the loss reduces what its own chunk holds
        if chunk.loss and contents.loss:
            of_chunk = only_chunk(chunk)
            tables = num_vocab_tables(plan, of_chunk) - num_unsharded_tables(plan, of_chunk)
            own = tables * table + depths * 2 * plan.model.dim**2
            loss_root = min(loss_root, own)
    return replace(
        units,
        loss_root=loss_root,
        previous=_first_gathered(plan, position.previous_layer),
        last_reduced=loss_root if position.is_before_loss else _first_gathered(plan, next_layer),
        after_core=_weights_after_core(plan, position.layer) if units.layer else 0.0,
        mtp_root=max(0.0, units.root - table) if units.root and position.is_before_mtp else 0.0,
    )


def _layer_units(plan: Plan, layer: Layer, num_tables: int, mtp_depths: int) -> FsdpUnits:
    """The units of a layer and of a root with so many vocabulary tables and MTP depths."""
    model, layout = plan.model, plan.layout
    root = loss_root = experts = padded = 0.0
    shards, expert_shards = layout.dp * layout.cp // layout.replicate, layout.edp // layout.replicate
    if shards > 1:
        table = model.vocab / layout.tp * model.dim
        root = num_tables * table + mtp_depths * 2 * model.dim**2
        loss_root = min(num_tables, 1) * table if _reduces_by_parameter(plan) else root
    if model.moe and layer.ffn == "moe" and expert_shards > 1:
        num_local = num_local_experts(plan)
        experts = model.moe.num_experts * expert_params(model) / layout.ep / layout.etp
        padded = experts * -(-num_local // expert_shards) * expert_shards / num_local
    rest = _without_experts(plan, layer)
    return FsdpUnits(root, loss_root, rest, experts, padded, max(1, expert_shards), max(1, shards))


def _first_gathered(plan: Plan, layer: Layer | None) -> float:
    """The unit of a layer that its backward gathers first and reduces last."""
    return 0.0 if layer is None else _without_experts(plan, layer) or _layer_units(plan, layer, 0, 0).padded_experts


def _without_experts(plan: Plan, layer: Layer | None) -> float:
    """Elements of a layer without its routed experts."""
    model, layout = plan.model, plan.layout
    if layer is None or layout.dp * layout.cp // layout.replicate <= 1:
        return 0.0
    sharded = mixer_params(model, layer) + (dense_params(model) if layer.ffn == "dense" else 0)
    replicated = norm_params(model, layer)
    if layer.ffn == "moe":
        sharded, replicated = sharded + shared_params(model), replicated + router_params(model)
    return sharded / layout.tp + replicated


def _weights_after_core(plan: Plan, layer: Layer) -> float:
    """Weights of a layer after the core of its mixer, without the routed experts."""
    model = plan.model
    spec = model.attention_of(layer)
    if spec is None:
        return 0.0
    values = spec.num_heads * (spec.v_dim if isinstance(spec, MlaSpec) else spec.head_dim)
    ffn = dense_params(model) if layer.ffn == "dense" else shared_params(model) if layer.ffn == "moe" else 0
    return (values * model.dim + ffn) / plan.layout.tp


def _reduces_by_parameter(plan: Plan) -> bool:
    """Whether torch reduces only the parameters of a unit that have a gradient. torch 2.11 does; later releases, which
    run unless the plan says otherwise, reduce a unit as a whole."""
    parts = (plan.stack.torch or "").split(".")[:2]
    return len(parts) == 2 and all(map(str.isdigit, parts)) and tuple(map(int, parts)) <= (2, 11)


def bytes_at_layer_points(local: LocalSizes, units: FsdpUnits) -> dict[str, float]:
    """Gathered weights and reductions in flight at each point of a layer, by the point's name."""
    b = local.element_bytes
    always = b * (units.root + units.layer)
    experts = b * units.padded_experts + quantized_expert_bytes(local, units)
    trained, experts_trained = local.trained_fraction, local.trained_expert_fraction
    reduced, mtp_root = local.reduced_bytes * units.last_reduced * trained, b * units.mtp_root * trained
    reducing = local.reduced_bytes * units.padded_experts * experts_trained or reduced
    if local.expert_chunk_fraction < 1 and units.padded_experts:  # of the chunk of tokens before
        reduced = max(reduced, reducing)
    return {
        "a forward": always + (b * units.padded_experts or b * units.layer),
        "a second forward": always + experts + reduced + mtp_root,
        "a backward": always + experts + reduced + mtp_root + b * units.previous,
        "a mixer's backward": always + mtp_root + b * (units.previous + units.after_core * trained) + reducing,
    }


def quantized_expert_bytes(local: LocalSizes, units: FsdpUnits) -> float:
    """FP8 copies of gathered experts, one for each orientation that the GEMMs read."""
    return 2 * units.experts if local.quantized_bytes and local.uses_fused_experts else 0.0


def reduced_shard_bytes(
    local: LocalSizes, chunk: Chunk, layers: Sequence[Layer], experts_of: Layer = NO_LAYER
) -> float:
    """Shards of gradients that a backward has reduced over the copies of the model: those of the loss, of `layers` and
    of one more layer's experts. torch holds them until the backward of the chunk is over."""
    if local.plan.layout.replicate == 1:
        return 0.0
    at_loss = fsdp_units(local.plan, only_chunk(chunk), at_chunk_end())
    elements = at_loss.loss_root / at_loss.shards if chunk.loss else 0.0
    for layer in layers:
        units = _layer_units(local.plan, layer, 0, 0)
        elements += units.layer / units.shards + units.padded_experts / units.expert_shards
    units = _layer_units(local.plan, experts_of, 0, 0)
    # Frozen weights are not reduced; of those in several units the part that trains is taken for each.
    trained = max(local.trained_fraction, local.trained_expert_fraction)
    return local.reduced_bytes * (elements + units.padded_experts / units.expert_shards) * trained


def expert_points(
    local: LocalSizes,
    units: FsdpUnits,
    position: LayerPosition,
    saved_experts: float,
    recomputed: float,
    freed: Terms,
) -> list[PeakPoint]:
    """The points at which a layer's experts are gathered, in forward and backward, and reduced.

    `saved_experts` is what the experts save without recompute, `recomputed` what the feed-forward part makes again.
    """
    if not units.experts:
        return []
    b = local.element_bytes
    always, rows = b * (units.root + units.layer), b * local.model.dim * local.expert_rows
    moving = experts_peak(local.without_recompute if local.recompute & {"moe", "full"} else local)
    gathered = always + 2 * b * units.padded_experts + quantized_expert_bytes(local, units)
    trained, experts_trained = local.trained_fraction, local.trained_expert_fraction
    with_reduction = gathered + (local.reduced_bytes * units.last_reduced + b * units.mtp_root) * trained
    in_backward: Terms = {"workspace": with_reduction + rows}
    # Frozen experts are gathered when the gradient of their output arrives, if that is before a recompute begins.
    is_frozen = not {"expert_rows", "expert_product"} & local.saved_inputs
    is_early = "full" not in local.recompute and is_frozen and early_grad_rows(local) > 0
    if local.recompute & {"moe", "full"} and not is_early:
        in_backward = {"workspace": with_reduction + moving, "recompute": recomputed}
    copied = max(b * units.experts, FP32 * units.padded_experts / units.expert_shards + b * units.experts / 3)
    reduction = always + b * (units.previous + units.mtp_root * trained) + copied * experts_trained - saved_experts
    reduction += local.reduced_bytes * units.padded_experts * experts_trained
    reducing = {"workspace": reduction, "recompute": recomputed}
    done = position.done_fraction
    return [
        PeakPoint("a gathering", "forward", {"workspace": gathered, "dispatch": moving}, freed),
        PeakPoint("a gathering", "backward", in_backward, freed, done, after_head=True),
        PeakPoint("a reduction", "backward", reducing, freed, done, after_head=True),
    ]


def root_points(local: LocalSizes, units: FsdpUnits, chunk: Chunk, saved: Terms) -> list[PeakPoint]:
    """The points at which the root unit is reduced or gathered. `saved` are the chunk's activations of one
    microbatch."""
    b, layout = local.element_bytes, local.plan.layout
    points = []
    if chunk.loss and units.loss_root and "head" in local.saved_inputs:
        # The chunk's root is gathered once more, for its part at the other end of the model.
        own = fsdp_units(local.plan, only_chunk(chunk), at_chunk_end()).root
        # Copies of the model are then summed, shard by shard.
        summed = local.reduced_bytes * units.loss_root / units.shards if layout.replicate > 1 else 0.0
        size = {"workspace": local.reduced_bytes * units.loss_root + b * (units.root + own)}
        points.append(PeakPoint("the loss's reduction", "backward", size, after_head=True, reduced_shards=summed))
    if chunk.embedding and (layout.pp == 1 or "embedding" not in local.saved_inputs):
        # A microbatch begins with a sharded root. The buffer that it was gathered into is there until the next unit is.
        size = {"workspace": 2 * b * (units.root + units.layer)}
        points.append(PeakPoint("the root's gathering", "forward", size, saved))
    if chunk.embedding and layout.pp > 1 and "embedding" in local.saved_inputs:
        # After a microbatch's backward: the table's gradient, and the same in fp32. Nothing is left of its pictures.
        pictures = {"vision": vision_saved_bytes(local.plan)} if local.plan.is_vlm else {}
        size = {"workspace": units.root * (b + local.reduced_bytes)}
        points.append(PeakPoint("the embedding's reduction", "backward", size, saved | pictures, 1.0))
        reduced = local.reduced_bytes * (units.layer or units.padded_experts)
        size = {"workspace": b * units.root + embedding_transients(local, False) + reduced}
        points.append(PeakPoint("the embedding's backward", "backward", size, saved, 1.0))
        # A backward leaves the root sharded. In an interleaved schedule another backward may be next, else a forward
        # is.
        size = {"workspace": b * (2 * units.root + units.layer)}
        points.append(PeakPoint("the embedding's gathering", "backward", size, {} if layout.vpp > 1 else saved))
    layers = chunk_layers(local.plan, chunk)
    of_layers = reduced_shard_bytes(local, chunk, layers)
    # The shard of the table is its gradient, or is added to it.
    of_table = {"the embedding's reduction": FP32 * units.root / units.shards}
    return [
        replace(point, reduced_shards=of_layers + of_table.get(point.name, 0.0)) if "embedding" in point.name else point
        for point in points
    ]


def num_vocab_tables(plan: Plan, contents: StageContents) -> int:
    """Vocabulary tables of a rank: embedding and output layer. Multi-token prediction needs the first on its rank, and
    so does a tied output layer."""
    tied = plan.model.tied
    has_embedding = contents.embedding or contents.mtp > 0 or (tied and contents.loss)
    return has_embedding + (contents.loss and not tied)


def num_unsharded_tables(plan: Plan, contents: StageContents) -> int:
    """Vocabulary tables of a rank that FSDP leaves to ZeRO-1, because some pipeline rank uses them in several of its
    chunks."""
    if plan.knobs.data_parallel == "zero1" or plan.layout.vpp == 1:
        return 0
    in_several = [[_uses_tables(plan, chunk) for chunk in stage.chunks] for stage in stage_contents(plan)]
    several = [max(sum(uses[n] for uses in of_stage) for of_stage in in_several) > 1 for n in range(2)]
    ends = Chunk((), contents.embedding, contents.mtp, contents.loss)
    return sum(used and apart for used, apart in zip(_uses_tables(plan, ends), several, strict=True))


def _uses_tables(plan: Plan, chunk: Chunk) -> tuple[bool, bool]:
    """Whether a chunk uses the embedding's table, and that of the output layer where it is another one."""
    tied = plan.model.tied
    return chunk.embedding or chunk.mtp > 0 or (chunk.loss and tied), chunk.loss and not tied
