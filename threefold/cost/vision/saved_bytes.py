"""Bytes that the image encoder and the projector of our own engine save from forward to backward.

Counted from the code of `engine/vision/`, tensor by tensor; rehearsals check the numbers against it. The first pipeline
chunk holds them for each microbatch in flight (`memory/threefold/model.py`).
"""

from threefold.cost.vision.planned_pictures import PlannedPictures, pictures_of_rank, planned_pictures
from threefold.plan.plan import Plan
from threefold.spec.model import VisionSpec

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
