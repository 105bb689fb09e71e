"""Bytes of FSDP's gathered units, and of their reductions, as the passes of EP overlap meet them.

`overlap_peak.py` asks for them around each layer of a chunk. `fsdp.py` counts the units themselves.

Mirrors `engine/data_parallel/fsdp.py`, `engine/schedule/fsdp_node_backward.py`.
"""

from dataclasses import dataclass

from threefold.cost.memory.threefold.fsdp import fsdp_units, only_chunk, quantized_expert_bytes
from threefold.cost.memory.threefold.local_sizes import LocalSizes
from threefold.cost.memory.threefold.peak_points import NO_LAYER, LayerPosition
from threefold.cost.stage_contents import chunk_layers
from threefold.layout.stages import Chunk
from threefold.spec.model import Layer


@dataclass(frozen=True, slots=True)
class GatheredBytes:
    """Bytes of FSDP's gathered units around a layer, and of their reductions; all 0 under ZeRO-1."""

    root: float = 0.0
    layer: float = 0.0  # the layer without its routed experts
    experts: float = 0.0
    root_reduced: float = 0.0
    layer_reduced: float = 0.0
    experts_reduced: float = 0.0
    layer_shard: float = 0.0  # of the reduced gradients, held with HSDP until the backward of the chunk is over
    experts_shard: float = 0.0
    expert_grads: float = 0.0  # the experts' gradients as the backward makes them
    quantized_experts: float = 0.0  # FP8 copies of the experts
    shards: int = 1  # ranks over which a layer is sharded
    expert_shards: int = 1


def gathered_bytes(local: LocalSizes, chunk: Chunk, layer: Layer = NO_LAYER) -> GatheredBytes:
    """What FSDP gathers and reduces around a layer of a chunk."""
    if local.plan.knobs.data_parallel == "zero1":
        return GatheredBytes()
    b = local.element_bytes
    position = LayerPosition(layer, (), None, is_before_loss=False, is_before_mtp=False, done_fraction=0.0)
    units = fsdp_units(local.plan, only_chunk(chunk), position)
    # Frozen weights have no gradients to reduce.
    trained = local.reduced_bytes * local.trained_fraction
    experts_trained = local.reduced_bytes * local.trained_expert_fraction
    is_replicated = local.plan.layout.replicate > 1
    return GatheredBytes(
        root=b * units.root,
        layer=b * units.layer,
        experts=b * units.padded_experts,
        # With copies of the model the reduced shard is summed over them.
        root_reduced=_trained_root(local, units.root) * local.reduced_bytes * (1 + is_replicated / units.shards),
        layer_reduced=trained * units.layer,
        experts_reduced=experts_trained * units.padded_experts,
        layer_shard=trained * units.layer / units.shards * is_replicated,
        experts_shard=experts_trained * units.padded_experts / units.expert_shards * is_replicated,
        expert_grads=b * units.experts * local.trained_expert_fraction,
        quantized_experts=quantized_expert_bytes(local, units),
        shards=units.shards,
        expert_shards=units.expert_shards,
    )


def prefetched_bytes(local: LocalSizes, chunk: Chunk, number: int, shards_only: bool = False) -> float:
    """Bytes of the unit that the backward of a layer gathers ahead, or of the rank's shards of it: the one that was
    used before it in the forwards, an exchange's experts last. Before the first layer that is the root, which is
    gathered; a chunk without a root finds the last unit of the forward before."""
    layers = chunk_layers(local.plan, chunk)
    if local.plan.knobs.data_parallel == "zero1" or not layers:
        return 0.0
    if number == 0 and (local.plan.layout.pp == 1 or gathered_bytes(local, chunk).root):
        return 0.0
    units = gathered_bytes(local, chunk, layers[number - 1])
    if shards_only:
        return units.experts / units.expert_shards or units.layer / units.shards
    return units.experts or units.layer


def _trained_root(local: LocalSizes, root: float) -> float:
    """Elements of a root unit that have gradients: those of trained tables."""
    return root if {"head", "embedding"} & local.saved_inputs else 0.0
