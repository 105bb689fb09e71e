"""Defines `PeakPoint`, a point of a pass at which memory may peak, and `LayerPosition`, how far a backward has come.

`layer_points.py` makes the points of a layer, `fsdp.py` those of FSDP's gathered experts and root, and `peak.py` those
at the ends of the model. `peak.py` then picks the largest sum over points and moments of the schedule.
`layer_positions` here lists the positions of a chunk at which to look.

Mirrors no file of the engine.
"""

from dataclasses import dataclass, field

from threefold.cost.memory.stage_memory import Terms, add_terms
from threefold.cost.stage_contents import chunk_layers, layers_per_recompute
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

NO_LAYER = Layer("none", "none")


@dataclass(frozen=True, slots=True)
class PeakPoint:
    """A point in a pass through a chunk, relative to what the microbatches in flight hold."""

    name: str  # as it is printed: "a backward"
    pass_name: str  # "forward", "backward", "wgrad" or "optimizer"
    added: Terms  # bytes on top of saved activations
    freed: Terms = field(default_factory=dict)  # saved activations that are freed by then
    done_fraction: float = 0.0  # fraction of the chunk's layers that have their weight gradients
    after_head: bool = False  # whether the output layer has its weight gradient
    reduced_shards: float = 0.0  # bytes of HSDP's reduced gradients; in a chunk's first backward they are its gradients

    @property
    def net_bytes(self) -> float:
        return sum(self.added.values()) - sum(self.freed.values())


@dataclass(frozen=True, slots=True)
class LayerPosition:
    """A layer at which the backward of a chunk is."""

    layer: Layer
    later_layers: tuple[Layer, ...]  # layers of the chunk after it, whose backward is over
    previous_layer: Layer | None  # the layer before it, whose backward comes next
    is_before_loss: bool  # only the loss follows it
    is_before_mtp: bool  # depths of multi-token prediction follow it
    done_fraction: float  # fraction of the chunk's layers whose backward is over

    def freed(self, saved: dict[Layer, Terms]) -> Terms:
        """Activations of the later layers, for one microbatch."""
        return add_terms(saved.get(layer, {}) for layer in self.later_layers)


def at_chunk_end() -> LayerPosition:
    """The position at the loss, before the backward of any layer."""
    return LayerPosition(NO_LAYER, (), None, is_before_loss=True, is_before_mtp=False, done_fraction=0.0)


def layer_positions(plan: Plan, chunk: Chunk) -> list[LayerPosition]:
    """The positions of a chunk at which the peak can be.

    For every kind of layer these are the last one in the chunk and, because a reduction of the next layer may still
    be running, the last one with another layer after it. The first layer counts, where most gradients are there, and
    the last one that is recomputed with it; the second, which brings the first one's offloaded tensors back.
    """
    found: dict[tuple[object, ...], LayerPosition] = {}
    special = {0, layers_per_recompute(plan) - 1} | (
        {1} if plan.knobs.activation_offload or plan.knobs.activation_offload_layers else set()
    )
    layers = chunk_layers(plan, chunk) or (NO_LAYER,)
    for index, layer in enumerate(layers):
        later, previous = layers[index + 1 :], layers[index - 1] if index else None
        before_loss = chunk.loss and not later
        before_mtp = index < len(chunk.layers) and chunk.mtp > 0
        # Among equal keys the last position stays: fewest layers are freed by then.
        found[layer, before_mtp, before_loss, not later, index if index in special else None] = LayerPosition(
            layer, later, previous, before_loss, before_mtp, len(later) / len(layers)
        )
    return list(found.values())
