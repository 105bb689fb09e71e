"""Features of pictures as our own engine puts them at their tokens: bytes that the passes of a pipeline chunk hold.

The first chunk places each feature in hidden states of whole sequences, of which a rank takes its part; so do the
gradients on their way back (`engine/vision.py`). Features for layers (deepstack) and for MTP depths of later
chunks travel on with the hidden states. `memory/threefold` asks for these bytes at the points of a pass.
"""

from dataclasses import dataclass

from threefold.cost.vision.planned_pictures import pictures_of_rank, planned_pictures
from threefold.cost.vision.saved_bytes import num_deepstack_behind, num_picture_states_behind, trains_part
from threefold.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class PlacedFeatures:
    """Features at their tokens in the passes of one chunk."""

    row: float = 0.0  # bytes of hidden states on the rank
    whole: float = 0.0  # bytes of hidden states of whole sequences
    shard: float = 0.0  # of a context-parallel rank; tensor-parallel ranks hold views of it
    projected: float = 0.0  # bytes of the projector's results for all pictures, which a forward of the chunk holds
    gathered: float = 0.0  # of the same as ranks that share sequences gather them, each with as many rows
    num_used: int = 0  # features that layers of the chunk add to their output, one each from the first on
    num_placed: int = 0  # features that the chunk places beside the main ones, for its own layers and later chunks
    places_ahead: bool = False  # whether some of these are for MTP depths of later chunks
    num_received: int = 0  # features that come with the hidden states of the chunk before
    has_gradient: bool = False  # whether the features of this chunk have gradients
    is_split: bool = False  # whether a rank has only a part of the sequence

    @property
    def in_forward(self) -> float:
        """Bytes that are there from the start of a forward until its layers are through: the projector's results, and
        features that the chunk has placed and that do not travel on."""
        return self.projected + (self.num_used * self.shard if self.num_placed else 0.0)

    @property
    def while_placing(self) -> float:
        """The most bytes before the first layer: the last feature among whole sequences, in zeros and with its rows,
        those that were placed before it, and the tokens' embeddings. Features for MTP are moved once more."""
        if not self.whole:
            return 0.0
        whole = (3 if self.places_ahead else 2) * self.whole
        return self.projected + max(self.gathered, whole + self.num_placed * self.shard + self.row)

    @property
    def while_placing_ahead(self) -> float:
        """The same for a depth of MTP, behind the layers: the features are moved by the tokens that it is ahead."""
        return 3 * self.whole + self.projected + self.row

    def gradients(self, number: int) -> float:
        """Bytes of gradients that wait for the features' backward when the backward is at layer `number` of the
        chunk: those of what layers from there on have added."""
        return max(0, self.num_used - number) * self.row if self.has_gradient else 0.0

    @property
    def backward(self) -> float:
        """The most bytes behind the layers' backward, when gradients become those of whole sequences: the two spans of
        a rank by themselves and their sum, while those of the embeddings and of the other features wait. Then they
        become those of all ranks' rows: zeros, and the sum with them."""
        if not (self.has_gradient and self.whole):
            return 0.0
        placed = (3 * self.whole if self.is_split else self.shard) + (2 + self.num_used) * self.row
        return max(placed, self.projected + 2 * self.gathered)


NO_FEATURES = PlacedFeatures()


def placed_features(plan: Plan, number: int) -> PlacedFeatures:
    """The features in pipeline chunk `number`. A microbatch without pictures has those of a blank one."""
    if plan.model.vision is None:
        return NO_FEATURES
    layout, is_first = plan.layout, plan.chunks[number].embedding
    element_bytes = 4 if plan.knobs.precision == "fp32" else 2
    whole = element_bytes * plan.model.dim * plan.job.micro_batch * plan.job.seq_len
    num_deepstack = min(len(plan.model.vision.deepstack), plan.model.num_layers)
    num_ahead = sum(chunk.mtp for chunk in plan.chunks[number + 1 :])
    pictures = planned_pictures(plan)
    num_tokens = pictures.count * pictures.tokens if pictures and is_first else 0
    num_ranks, of_rank = layout.cp * layout.tp, pictures_of_rank(plan) * pictures.tokens if pictures else 0
    num_gathered = num_ranks * of_rank if num_ranks > 1 and is_first else 0
    token_bytes = element_bytes * plan.model.dim * (1 + len(plan.model.vision.deepstack))
    num_here = num_deepstack if is_first else num_deepstack_behind(plan, number - 1)
    return PlacedFeatures(
        row=whole / layout.cp / layout.tp,
        whole=whole if is_first else 0.0,
        shard=whole / layout.cp,
        projected=token_bytes * num_tokens,
        gathered=token_bytes * num_gathered,
        num_used=min(num_here, len(plan.chunks[number].layers)),
        num_placed=num_deepstack + num_ahead if is_first else 0,
        places_ahead=is_first and num_ahead > 0,
        num_received=0 if is_first else num_picture_states_behind(plan, number - 1),
        # States that a chunk receives have gradients in any case.
        has_gradient=not is_first or trains_part(plan, "vision") or trains_part(plan, "projector"),
        is_split=layout.cp > 1,
    )
