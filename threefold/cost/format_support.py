"""Number formats: bytes of gradients and optimizer states, and which GEMM formats our own engine has kernels for.

A format without kernels is emulated: numbers are rounded as the format does and multiplied in fp32, which gives the
right numbers at the speed of bf16 at best. Routed experts have kernels in fewer cases than dense layers, because
kernels that run one expert at a time want numbers of rows that routing seldom gives. `rules/knobs/precision.py` warns
of emulation, `search/` avoids it, and `time/` prices it.
"""

from dataclasses import replace

from threefold.cost.stack_traits import STACK_TRAITS
from threefold.plan.plan import Plan
from threefold.spec.candidates import low_formats
from threefold.spec.chips import NATIVE_FORMATS
from threefold.spec.stacks import FUSED_ACTIVATIONS, FUSED_DIM, FUSED_EXPERTS, FUSED_WIDTH

BF16_BYTES = 2
# Bytes of an element of a gradient or of an optimizer state.
STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def master_weight_bytes(plan: Plan) -> int:
    """Bytes that a master weight takes beside a 16-bit weight: all of it, or its remainder. fp32 weights need none."""
    if plan.knobs.precision == "fp32" or not plan.knobs.master_weights:
        return 0
    return 2 if plan.knobs.store_param_remainders and plan.knobs.precision != "fp16" else 4


def offloads_masters(plan: Plan) -> bool:
    """Whether Megatron moves master weights to the host with an optimizer's moments.

    Its precision-aware optimizer keeps them there, 12 bytes a parameter in all. Without it only the 8 bytes of moments
    leave the GPU, which is what Bridge's skill on CPU offloading measured (2026-08-22: 8% a quarter, 32% in all).
    Quantized parameters gathered by another recipe than delayed scaling exclude it (megatron-core 0.19.2,
    training/arguments.py).
    """
    return not (plan.low_precision and plan.knobs.fp8_params) or plan.knobs.precision == "fp8-tensor"


def gathered_weight_bytes(plan: Plan) -> int:
    """Bytes of a weight as data parallelism gathers it. The distributed optimizer gathers MXFP8 parameters in BF16,
    through the gradient buffer (reuse_grad_buf_for_mxfp8_param_ag; Bridge's guide on MoE, 2026-08-22)."""
    in_bf16 = plan.knobs.precision == "mxfp8" and plan.knobs.data_parallel == "zero1"
    return 1 if plan.knobs.fp8_params and plan.low_precision and not in_bf16 else 2


def can_split_masters(plan: Plan) -> bool:
    """Whether our engine keeps whole fp32 master weights beside bf16 weights, of which remainders would do."""
    has_whole_masters = master_weight_bytes(plan) == 4 and plan.knobs.precision != "fp16"
    return has_whole_masters and plan.target == "threefold" and plan.knobs.data_parallel == "zero1"


def writes_gradients_once(plan: Plan) -> bool:
    """Whether GEMMs write the gradients of a step as the optimizer reads them: those of a single microbatch on one
    rank, unless the stack adds them to a sum."""
    is_single = plan.num_microbatches * plan.layout.gpus == 1
    return is_single and not STACK_TRAITS[plan.target].adds_single_gradient


def muon_format(plan: Plan) -> str:
    """The format of the GEMMs in Muon's orthogonalization."""
    if not STACK_TRAITS[plan.target].emulates_formats:  # Megatron
        return "bf16"
    in_fp32 = plan.knobs.precision == "fp32" or plan.chip.architecture == "cpu"
    return plan.knobs.muon_dtype or ("fp32" if in_fp32 else "bf16")


def is_emulated(plan: Plan) -> bool:
    """Whether the engine has no kernels for the plan's precision on this chip."""
    if not STACK_TRAITS[plan.target].emulates_formats:
        return False
    name, architecture = plan.knobs.precision, plan.chip.architecture
    # Kernels for scales of blocks of 128 and of rows exist on Hopper only: Blackwell has MXFP8 for that purpose.
    lacks_kernels = name in FUSED_EXPERTS and architecture != "hopper"
    return lacks_kernels or name not in NATIVE_FORMATS[architecture]


def experts_are_emulated(plan: Plan) -> bool:
    """Whether the experts' GEMMs are emulated, with or without those of dense layers."""
    if not STACK_TRAITS[plan.target].emulates_formats or not plan.low_precision or not plan.model.is_moe:
        return False
    return is_emulated(plan) or not has_expert_kernels(plan)


def has_expert_kernels(plan: Plan) -> bool:
    """Whether format and sizes suit the engine's low-precision expert kernels, on a chip that has them."""
    moe = plan.model.moe
    if moe is None or moe.bias or plan.knobs.precision not in FUSED_EXPERTS or not has_fused_activation(plan):
        return False
    return moe.expert_dim % (FUSED_WIDTH * plan.layout.etp) == 0 and plan.model.dim % FUSED_DIM == 0


def has_fused_activation(plan: Plan) -> bool:
    """Whether the engine's fused expert kernels have the activation of the model."""
    return plan.model.glu and plan.model.activation in FUSED_ACTIVATIONS


def uses_fused_experts(plan: Plan) -> bool:
    """Whether the engine runs all of an expert in kernels that save only its input (or that in FP8) and FC1's
    output."""
    if adapts_experts(plan) or not has_fused_activation(plan):
        return False
    return has_expert_kernels(plan) if plan.low_precision else plan.knobs.expert_fusion


def adapts_experts(plan: Plan) -> bool:
    """Whether experts have LoRA adapters, which come between the steps that fused kernels do in one."""
    return plan.job.lora_rank is not None and "experts" in plan.job.lora_targets


def runs_fused_experts(plan: Plan) -> bool:
    """Whether experts run in fused kernels on the plan's chip.

    Our engine's in low precision are always fused; in 16 bits the plan asks for it, and Hopper and later have kernels.
    Megatron asks Transformer Engine for it, which fuses no experts with biases.
    """
    if not STACK_TRAITS[plan.target].emulates_formats:
        return plan.knobs.expert_fusion and plan.model.moe is not None and not plan.model.moe.bias
    if adapts_experts(plan) or not has_fused_activation(plan):
        return False
    if plan.low_precision:
        return not experts_are_emulated(plan)
    return plan.knobs.expert_fusion and plan.chip.architecture not in ("ampere", "cpu")


def can_fuse_experts(plan: Plan) -> bool:
    """Whether `knobs.expert_fusion` has kernels that are known to run: ours in 16 bits, whose copies want rows of whole
    16 bytes; Transformer Engine's in MXFP8 on Blackwell, as in published runs."""
    moe = plan.model.moe
    if moe is None:
        return False
    asked = replace(plan, knobs=replace(plan.knobs, expert_fusion=True))
    if not STACK_TRAITS[plan.target].emulates_formats:
        return runs_fused_experts(asked) and plan.chip.architecture == "blackwell" and plan.knobs.precision == "mxfp8"
    aligned = all(size * BF16_BYTES % 16 == 0 for size in (plan.model.dim, moe.expert_dim // plan.layout.etp))
    return plan.knobs.precision in ("bf16", "fp16") and aligned and runs_fused_experts(asked)


def low_precisions(plan: Plan) -> tuple[str, ...]:
    """The candidates below sixteen bits for which chip and stack have kernels, in the order of comparison."""
    trials = {name: replace(plan, knobs=replace(plan.knobs, precision=name)) for name in low_formats(plan.chip)}
    return tuple(name for name, trial in trials.items() if not (is_emulated(trial) or experts_are_emulated(trial)))


def gemm_precision(plan: Plan) -> str:
    """The precision whose speed dense GEMMs have at best."""
    return "bf16" if is_emulated(plan) else plan.knobs.precision


def expert_gemm_precision(plan: Plan) -> str:
    """The precision whose speed the experts' grouped GEMMs have at best."""
    return "bf16" if experts_are_emulated(plan) else plan.knobs.precision
