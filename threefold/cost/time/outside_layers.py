"""Seconds of a microbatch outside its layers: output layer and loss, image encoder, and the projection of an MTP depth.

All of them are forward and backward together; `time/step.py` adds them to the stages that hold these parts.
"""

from threefold.cost.format_support import gemm_precision
from threefold.cost.rates import Rates, gemm_rate
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.cost.trained_weights import gemms_per_weight
from threefold.cost.vision import expected_patches, pictures_of_rank, trains_part
from threefold.plan.plan import Plan
from threefold.spec.flops import padded_vocab


def loss_seconds(plan: Plan, rates: Rates) -> float:
    """Embedding, output layer and cross entropy of one microbatch."""
    tokens = plan.job.micro_batch * plan.job.seq_len / plan.layout.cp
    vocab = padded_vocab(plan.model, plan.layout.tp) / plan.layout.tp
    flops = 2 * gemms_per_weight(plan, "head")[0] * plan.model.dim * vocab * tokens
    traits = STACK_TRAITS[plan.target]
    # In FP8 our kernel reads the logits once more, to quantize their gradient both ways.
    moved = tokens * vocab * (traits.logit_bytes + (2 if plan.knobs.fp8_output and traits.emulates_formats else 0))
    precision = gemm_precision(plan) if plan.knobs.fp8_output else "bf16"
    return flops / gemm_rate(rates, plan, precision, tokens) + moved / (plan.chip.memory_bandwidth * rates.memory)


def vision_seconds(plan: Plan, rates: Rates) -> float:
    """The image encoder on one microbatch; a frozen encoder runs forward only, a recomputed one forward twice."""
    vision = plan.model.vision
    if vision is None:
        return 0.0
    patches, of_picture = expected_patches(plan)
    if STACK_TRAITS[plan.target].shares_pictures:
        patches = min(patches, pictures_of_rank(plan) * of_picture)
    per_patch = vision.depth * (8 * vision.dim**2 + 4 * vision.dim * vision.mlp_dim + 4 * of_picture * vision.dim)
    passes = 3 + ("full" in plan.vision_recompute) if trains_part(plan, "vision") else 1
    return passes * patches * per_patch / gemm_rate(rates, plan, "bf16", max(1.0, patches))


def mtp_projection_seconds(plan: Plan, rates: Rates) -> float:
    """The GEMM with which an MTP depth begins: it joins the hidden state and the next token's embedding."""
    tokens = plan.job.micro_batch * plan.job.seq_len / plan.layout.cp
    flops = 2 * gemms_per_weight(plan)[0] * 2 * plan.model.dim**2 * tokens / plan.layout.tp
    return flops / gemm_rate(rates, plan, gemm_precision(plan), tokens)
