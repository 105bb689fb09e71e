"""Formats below sixteen bits in our own engine: what it has kernels for, and what it emulates.

Emulated products are rounded as the format does and multiplied wide: right numbers, at the speed of bf16 at best.
Routed experts have kernels in fewer cases than dense layers: those that run one expert at a time take numbers of rows
that routing seldom gives.
"""

from dataclasses import replace

from threefold.plan.plan import Plan
from threefold.spec.chips import NATIVE_FORMATS
from threefold.spec.stacks import FUSED_DIM, FUSED_EXPERTS, FUSED_WIDTH, PRECISION


def emulated(plan: Plan) -> bool:
    """The format as a whole, on this chip."""
    if plan.target != "threefold":
        return False
    name, architecture = plan.knobs.precision, plan.chip.architecture
    # Kernels of blocks of 128 and of rows are Hopper's only: Blackwell has MXFP8 for that.
    foreign = name in FUSED_EXPERTS and architecture != "hopper"
    return foreign or name not in NATIVE_FORMATS[architecture]


def experts_emulated(plan: Plan) -> bool:
    """The experts, whether or not other products are."""
    if plan.target != "threefold" or not plan.low_precision or not plan.model.is_moe:
        return False
    return emulated(plan) or not kernels_take_experts(plan)


def kernels_take_experts(plan: Plan) -> bool:
    """By format and sizes, on a chip that has the kernels."""
    moe = plan.model.moe
    if moe is None or moe.bias or plan.knobs.precision not in FUSED_EXPERTS:
        return False
    return moe.expert_dim % (FUSED_WIDTH * plan.layout.etp) == 0 and plan.model.dim % FUSED_DIM == 0


def starting_precision(plan: Plan) -> str:
    """The platform's, or bf16 where our own engine would emulate that."""
    name = PRECISION[plan.chip.architecture].value
    trial = replace(plan, knobs=replace(plan.knobs, precision=name))
    return "bf16" if experts_emulated(trial) else name


def priced_as(plan: Plan) -> str:
    """The format whose speed dense products have at best."""
    return "bf16" if emulated(plan) else plan.knobs.precision


def experts_priced_as(plan: Plan) -> str:
    return "bf16" if experts_emulated(plan) else plan.knobs.precision
