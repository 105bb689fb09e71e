"""Where a pipeline rank of our own engine can be fullest: at a layer of one of its chunks, or at the loss."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from threefold.cost.share import Share
from threefold.layout.stages import Chunk, chunk_rank
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

Terms = dict[str, float]
NOTHING = Layer("none", "none")


class KeptLayer(Layer):
    """One that full recompute leaves out, which takes so many of the first ("block")."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a pipeline rank holds."""

    chunks: tuple[Chunk, ...]
    layers: tuple[Layer, ...]
    embedding: bool
    mtp: int
    loss: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """In a forward or backward through a chunk: bytes by term above what microbatches keep, of which some is `gone`.
    Of the chunk's layers a part `done` has its gradients, and behind its backward the head (`after_head`)."""

    name: str
    way: str
    size: Terms
    gone: Terms = field(default_factory=dict)
    done: float = 0.0
    after_head: bool = False

    @property
    def above(self) -> float:
        return sum(self.size.values()) - sum(self.gone.values())


@dataclass(frozen=True, slots=True)
class Place:
    """A layer of a chunk, in the backward: those `behind` have had theirs, `ahead` is whose turn comes next."""

    layer: Layer
    behind: tuple[Layer, ...]
    ahead: Layer | None
    closes: bool  # nothing but the loss lies behind
    mtp: bool  # multi-token prediction lies behind
    done: float  # of the chunk's layers

    def gone(self, saved: dict[Layer, Terms]) -> Terms:
        """Of one microbatch."""
        return added(saved.get(layer, {}) for layer in self.behind)


def of_layer(share: Share, layer: Layer) -> Share:
    return share.plain if isinstance(layer, KeptLayer) else share


def chunk_layers(plan: Plan, chunk: Chunk) -> tuple[Layer, ...]:
    layers = (*(plan.model.layers[i] for i in chunk.layers), *plan.model.mtp_depth * chunk.mtp)
    if not plan.full_recompute or plan.knobs.recompute_method != "block":
        return layers
    again = max(0, (plan.knobs.recompute_layers or 1) - _before(plan, chunk))
    again = min(again, len(chunk.layers))
    return layers[:again] + tuple(KeptLayer(layer.mixer, layer.ffn) for layer in layers[again:])


def _before(plan: Plan, chunk: Chunk) -> int:
    """Layers of the same rank in chunks before this one."""
    layout, index = plan.layout, plan.chunks.index(chunk)
    rank = partial(chunk_rank, pp=layout.pp, v_shaped=layout.pipeline_schedule == "dualpipev")
    return sum(len(plan.chunks[n].layers) for n in range(index) if rank(n) == rank(index))


def places(plan: Plan, chunk: Chunk) -> list[Place]:
    """Of every kind of layer the last in its chunk, and of those with others behind them, whose reductions may still be
    under way; the first, where most gradients are there, and the last that is recomputed with it; the second, which
    brings the first's tensors back from the host."""
    found: dict[tuple[object, ...], Place] = {}
    ends = {0, Share(plan).unit - 1} | ({1} if plan.knobs.activation_offload else set())
    layers = chunk_layers(plan, chunk) or (NOTHING,)
    for index, layer in enumerate(layers):
        behind, ahead = layers[index + 1 :], layers[index - 1] if index else None
        closes = chunk.loss and not behind
        mtp = index < len(chunk.layers) and chunk.mtp > 0
        # The last of a kind is kept, for the fewest have gone by then.
        found[layer, mtp, closes, not behind, index if index in ends else None] = Place(
            layer, behind, ahead, closes, mtp, len(behind) / len(layers)
        )
    return list(found.values())


def added(parts: Iterable[Terms]) -> Terms:
    sums: Terms = {}
    for part in parts:
        for name, size in part.items():
            sums[name] = sums.get(name, 0.0) + size
    return sums
