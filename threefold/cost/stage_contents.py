"""Which layers, and which ends of the model, each pipeline rank holds.

Memory, time and the number of parameters of a stage start from here. With PP 2 and VPP 2 of four layers, rank 0 holds
chunks 0 and 2: `StageContents(chunks=(chunk 0, chunk 2), layers=(layer 0, layer 2), embedding=True, mtp=0,
loss=False)`.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

from threefold.cost.trained_weights import first_gradient
from threefold.layout.stages import Chunk, chunk_rank
from threefold.plan.plan import Plan
from threefold.spec.model import Layer


@dataclass(frozen=True, slots=True)
class PlacedLayer(Layer):
    """A layer that a plan treats unlike others of its kind, by its place in the model or on its rank."""

    cp_comm: str | None = None  # its own entry of a list in `knobs.cp_comm`
    is_offloaded: bool = False  # whether all its activations go to the host (`activation_offload_layers`)
    # The first part of it with a gradient: `input`, `ffn_norm`, `ffn`, or `none` where only later layers have any.
    first_gradient: str = "input"
    is_adapted: bool = True  # whether LoRA gives it adapters; those of MTP depths have none


class NotRecomputedLayer(PlacedLayer):
    """A layer whose activations are saved although the plan has full recompute.

    `recompute_method = "block"` recomputes only the first `recompute_layers` layers of a rank; the others are of this
    class.
    """


@dataclass(frozen=True, slots=True)
class StageContents:
    """What one pipeline rank holds."""

    chunks: tuple[Chunk, ...]  # its virtual stages
    layers: tuple[Layer, ...]  # decoder layers of all its chunks, without those of MTP depths
    embedding: bool  # whether it holds the embedding
    mtp: int  # depths of multi-token prediction
    loss: bool  # whether it holds the output layer and the loss


def stage_contents(plan: Plan) -> list[StageContents]:
    """Contents of every pipeline rank, in order of ranks."""
    layout = plan.layout
    return _contents(plan.chunks, plan.model.layers, layout.pp, layout.pipeline_schedule == "dualpipev")


@lru_cache(maxsize=256)
def _contents(chunks: tuple[Chunk, ...], layers: tuple[Layer, ...], pp: int, v_shaped: bool) -> list[StageContents]:
    ranks: list[list[Chunk]] = [[] for _ in range(pp)]
    for index, chunk in enumerate(chunks):
        ranks[chunk_rank(index, pp, v_shaped)].append(chunk)
    return [
        StageContents(
            chunks=tuple(held),
            layers=tuple(layers[i] for chunk in held for i in chunk.layers),
            embedding=any(chunk.embedding for chunk in held),
            mtp=sum(chunk.mtp for chunk in held),
            loss=any(chunk.loss for chunk in held),
        )
        for held in ranks
    ]


def chunk_layers(plan: Plan, chunk: Chunk) -> tuple[Layer, ...]:
    """Layers of a chunk, followed by those of its MTP depths. Layers that "block" recompute leaves out, that are
    offloaded as a whole, have a kind of CP communication of their own, are before the first gradient or have no
    adapters beside others that have are marked."""
    decoder = plan.model.layers
    layers = (*(decoder[i] for i in chunk.layers), *plan.model.mtp_depth * chunk.mtp)
    layers = _from_first_gradient(plan, chunk, _placed_layers(plan, chunk, layers))
    if chunk.mtp and plan.job.lora_rank is not None:
        own = len(chunk.layers)
        return (*layers[:own], *(_placed(layer, is_adapted=False) for layer in layers[own:]))
    return layers


def _from_first_gradient(plan: Plan, chunk: Chunk, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers of a chunk, those before the first gradient and that with it marked."""
    first, part = first_gradient(plan) if chunk.embedding else (0, "input")
    first -= chunk.layers[0] if chunk.layers else 0
    if first <= 0 and not part.startswith("ffn"):
        return layers
    parts = ["none"] * first + ([part] if part.startswith("ffn") else [])
    marked = [_placed(layer, first_gradient=part) for layer, part in zip(layers, parts, strict=False)]
    return (*marked, *layers[len(parts) :])


def _placed(layer: Layer, **marks: str | bool) -> PlacedLayer:
    """The layer with more marks."""
    placed = layer if isinstance(layer, PlacedLayer) else PlacedLayer(layer.mixer, layer.ffn, layer.hashed)
    return replace(placed, **marks)  # type: ignore[arg-type]


def first_gradient_in(layer: Layer) -> str:
    """The first part of a layer that has a gradient; `none` where only later layers have any."""
    return layer.first_gradient if isinstance(layer, PlacedLayer) else "input"


def _placed_layers(plan: Plan, chunk: Chunk, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers of a chunk as recompute, offload and context parallelism place them."""
    knobs = plan.knobs
    is_block = plan.full_recompute and knobs.recompute_method == "block"
    # A list of another length is refused by a rule, which may ask for the price of the plan all the same.
    by_layer = len(knobs.cp_comm) == plan.model.num_layers and plan.layout.cp > 1 and isinstance(knobs.cp_comm, tuple)
    if not (is_block or by_layer or knobs.activation_offload_layers):
        return layers
    before = _num_layers_before(plan, chunk) if is_block or knobs.activation_offload_layers else 0
    recomputed = min((knobs.recompute_layers or 1) - before, len(chunk.layers)) if is_block else len(layers)
    offloaded = min(knobs.activation_offload_layers - before, len(chunk.layers))
    placed: list[Layer] = []
    for number, layer in enumerate(layers):
        index = chunk.layers[number] if number < len(chunk.layers) else -1
        cp_comm = knobs.cp_comm[index] if by_layer else None
        if number >= recomputed:
            layer = NotRecomputedLayer(layer.mixer, layer.ffn, layer.hashed, cp_comm, number < offloaded)
        elif cp_comm or number < offloaded:
            layer = PlacedLayer(layer.mixer, layer.ffn, layer.hashed, cp_comm, number < offloaded)
        placed.append(layer)
    return tuple(placed)


def _num_layers_before(plan: Plan, chunk: Chunk) -> int:
    """Layers in the earlier chunks of the same pipeline rank."""
    layout, index = plan.layout, plan.chunks.index(chunk)
    rank = partial(chunk_rank, pp=layout.pp, v_shaped=layout.pipeline_schedule == "dualpipev")
    return sum(len(plan.chunks[n].layers) for n in range(index) if rank(n) == rank(index))


def layers_per_recompute(plan: Plan) -> int:
    """Layers that "uniform" full recompute saves one input for and recomputes together; 1 without it."""
    is_uniform = plan.full_recompute and plan.knobs.recompute_method != "block"
    return max(1, plan.knobs.recompute_layers or 1) if is_uniform else 1
