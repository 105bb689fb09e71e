"""Images in our own engine: those that a plan expects, the encoder's parameters, and bytes that passes hold of them.

A plan says how many there are in a sequence (`job.images`) and not how large they are; each is taken as a square of
about one megapixel, or of `job.max_pixels`, as far as it fits into the sequence. Memory and time are priced for them,
and a rehearsal runs them. The first pipeline chunk holds what encoder and projector save for each microbatch in flight.

The first chunk places each feature in hidden states of whole sequences, of which a rank takes its part; so do the
gradients on their way back (`engine/vision.py`). Features for layers (deepstack) and for MTP depths of later
chunks travel on with the hidden states. `memory/threefold` asks for these bytes at the points of a pass.

Mirrors `engine/vision.py`, `engine/models/inputs.py`, `engine/shard/image_parallel.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from threefold.plan.plan import Plan
from threefold.spec.model import VisionSpec

_PIXELS = 2**20


@dataclass(frozen=True, slots=True)
class PlannedPictures:
    """The pictures of a microbatch, all of one size."""

    count: int
    grid: tuple[int, int]  # rows and columns of patches
    tokens: int  # of one picture in the decoder

    @property
    def patches(self) -> int:
        """Patches of one picture."""
        return self.grid[0] * self.grid[1]


def planned_pictures(plan: Plan) -> PlannedPictures | None:
    """The pictures of a microbatch; None for a text model and for a plan without images."""
    vision, job = plan.model.vision, plan.job
    images = 1.0 if job.images is None else job.images
    if vision is None or not images:
        return None
    pixels = min(_PIXELS, job.max_pixels or _PIXELS)
    side = max(1, min(math.isqrt(pixels) // (vision.patch * vision.merge), math.isqrt(job.seq_len)))
    most = job.seq_len // side**2 * job.micro_batch
    count = min(math.ceil(images * job.micro_batch), most)
    return PlannedPictures(count, (side * vision.merge, side * vision.merge), side**2)


def pictures_of_rank(plan: Plan) -> int:
    """The pictures that the busiest rank of our own engine encodes: those of a sequence are dealt out over CP x TP."""
    pictures = planned_pictures(plan)
    return 0 if pictures is None else -(-pictures.count // (plan.layout.cp * plan.layout.tp))


def expected_patches(plan: Plan) -> tuple[float, int]:
    """Patches of a microbatch on average, where `planned_pictures` counts whole pictures; and those of one picture."""
    pictures = planned_pictures(plan)
    if pictures is None:
        return 0.0, 0
    images = 1.0 if plan.job.images is None else plan.job.images
    return min(images * plan.job.micro_batch, pictures.count) * pictures.patches, pictures.patches


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


_FP32, _INT64 = 4, 8
_CHANNELS = 3


def vision_saved_bytes(plan: Plan) -> float:
    """Bytes of one microbatch. A frozen encoder saves nothing, and neither does a frozen projector behind it."""
    vision, pictures = plan.model.vision, planned_pictures(plan)
    if vision is None or pictures is None:
        return 0.0
    saved = 0.0
    if trains_part(plan, "vision"):
        saved = _encoder(plan, vision, pictures)
    if trains_part(plan, "vision") or trains_part(plan, "projector"):
        saved += _projector(plan, vision, pictures)
    return saved


def trains_part(plan: Plan, part: str) -> bool:
    """Whether parameters of a part of the model (`vision`, `projector`) get gradients."""
    return plan.job.lora_rank is None and part not in plan.job.freeze


def num_deepstack_behind(plan: Plan, number: int) -> int:
    """Deepstack features that pipeline chunks behind chunk `number` need: one for each of the first layers."""
    vision = plan.model.vision
    num_layers = sum(len(chunk.layers) for chunk in plan.chunks[: number + 1])
    if vision is None or number < 0:
        return 0
    return max(0, min(len(vision.deepstack), plan.model.num_layers) - num_layers)


def num_picture_states_behind(plan: Plan, number: int) -> int:
    """States with features of pictures that pipeline chunk `number` hands on: for layers, and one for each MTP depth
    behind it, which reads the features of the pictures ahead."""
    if plan.model.vision is None or number < 0:
        return 0
    return num_deepstack_behind(plan, number) + sum(chunk.mtp for chunk in plan.chunks[number + 1 :])


def _encoder(plan: Plan, vision: VisionSpec, pictures: PlannedPictures) -> float:
    b, dim, recomputed = _element_bytes(plan), vision.dim, plan.vision_recompute
    patches = pictures_of_rank(plan) * pictures.patches
    # The patch embedding saves its input, and of the position table the rows and weights that each patch blends.
    embedding = b * _CHANNELS * vision.temporal_patch * vision.patch**2 + 4 * (_INT64 + b)
    if "full" in recomputed:
        return patches * (embedding + b * dim * vision.depth)
    statistics = 2 * _FP32  # mean and deviation of a norm
    # The input of the norm; then the norm, queries, keys and values before and queries and keys behind the rotation,
    # and the output with its log-sum-exps.
    attention: float = b * dim
    if "attn" not in recomputed:
        # Only the flash kernels of GPUs write the output as the output projection reads it.
        copies = 0 if plan.chip.architecture != "cpu" and b == 2 else 1
        attention += b * (7 + copies) * dim + _FP32 * vision.num_heads + statistics
    mlp: float = b * dim
    if "mlp" not in recomputed:  # the norm, and the hidden layer before and behind its activation
        mlp += b * (dim + 2 * vision.mlp_dim) + statistics
    return patches * (embedding + vision.depth * (attention + mlp))


def _projector(plan: Plan, vision: VisionSpec, pictures: PlannedPictures) -> float:
    """Each merger saves its input, its norm, and the hidden layer before and behind its activation. The input of a
    deepstack merger is that of an encoder layer, which saves it too."""
    b, num_deepstack = _element_bytes(plan), len(vision.deepstack)
    patches = pictures_of_rank(plan) * pictures.patches
    inputs = 1 if trains_part(plan, "vision") else 1 + num_deepstack
    inner = 0 if {"full", "projector"} & set(plan.vision_recompute) else 3 * (1 + num_deepstack)
    return b * vision.dim * patches * (inputs + inner)


def _element_bytes(plan: Plan) -> int:
    return 4 if plan.knobs.precision == "fp32" else 2


def vision_parameters(vision: VisionSpec, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each, where the decoder has the model dim `dim`."""
    patch_values = _CHANNELS * vision.temporal_patch * vision.patch**2
    yield from _linear("vision.embed.patch", patch_values, vision.dim)
    yield "vision.embed.positions.weight", (vision.num_positions, vision.dim)
    for number in range(vision.depth):
        path = f"vision.layers.{number}"
        yield from _norm(f"{path}.attention_norm", vision.dim)
        yield from _linear(f"{path}.attention.qkv", vision.dim, 3 * vision.dim)
        yield from _linear(f"{path}.attention.out", vision.dim, vision.dim)
        yield from _norm(f"{path}.mlp_norm", vision.dim)
        yield from _linear(f"{path}.mlp.up", vision.dim, vision.mlp_dim)
        yield from _linear(f"{path}.mlp.down", vision.mlp_dim, vision.dim)
    joined = vision.dim * vision.merge**2
    yield from _merger("projector.main", vision.dim, joined, dim)
    for number in range(len(vision.deepstack)):
        yield from _merger(f"projector.deepstack.{number}", joined, joined, dim)


def _merger(path: str, norm_dim: int, joined: int, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _norm(f"{path}.norm", norm_dim)
    yield from _linear(f"{path}.up", joined, joined)
    yield from _linear(f"{path}.down", joined, dim)


def _linear(path: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.weight", (outputs, inputs)
    yield f"{path}.bias", (outputs,)


def _norm(path: str, dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.weight", (dim,)
    yield f"{path}.bias", (dim,)
