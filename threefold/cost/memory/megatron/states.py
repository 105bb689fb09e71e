"""Weights, gradients and optimizer states of a pipeline rank under Megatron, by memory term.

`megatron/model.py` calls `state_terms` once per stage. ZeRO-1 (the distributed optimizer) shards only the optimizer
states; FSDP shards all of them.
"""

from threefold.cost.format_support import STATE_BYTES, master_weight_bytes, offloads_masters
from threefold.cost.memory.stage_memory import Terms
from threefold.cost.rank_params import stage_params
from threefold.cost.stage_contents import StageContents
from threefold.plan.plan import Plan

# Bytes of an element in the GEMM format, block scales included.
FORMAT_BYTES = {"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "fp8-blockwise": 1 + 4 / 128}


def gemm_input_bytes(plan: Plan) -> float:
    """Bytes of an element of a GEMM input, as it is saved for the backward."""
    if plan.low_precision:
        return FORMAT_BYTES.get(plan.knobs.precision, 1.0)
    return 4.0 if plan.knobs.precision == "fp32" else 2.0


def state_terms(plan: Plan, contents: StageContents) -> Terms:
    """Bytes of the states of one rank, sharded as the plan says."""
    layout, knobs = plan.layout, plan.knobs
    dense, experts = stage_params(plan, contents)
    copies = layout.replicate
    dense_shards, expert_shards = max(1, layout.dp * layout.cp // copies), max(1, layout.edp // copies)
    optimized = dense / max(1, layout.dp * layout.cp) + experts / max(1, layout.edp)
    if knobs.data_parallel != "zero1":
        dense, experts = dense / dense_shards, experts / expert_shards
        optimized = dense + experts
    weight = 4 if knobs.precision == "fp32" else 2
    quantized = 0.0
    if plan.low_precision:
        # Both orientations of a scaled weight are kept; with fp8_params they are the weight itself.
        quantized = 2 * gemm_input_bytes(plan) * (dense * 0.8 + experts)
    weights = weight * (dense + experts)
    if plan.low_precision and knobs.fp8_params:
        weights = weight * dense * 0.2
    master = master_weight_bytes(plan)
    moments = 1 if plan.job.optimizer == "muon" else 2  # for embedding and head Muon too has two
    per_param = float(master + moments * STATE_BYTES[knobs.optimizer_dtype])
    per_param -= knobs.optimizer_offload * (per_param if offloads_masters(plan) else per_param - master)
    trained = 0.0 if "language" in plan.job.freeze else 1.0
    return {
        "weights": weights,
        "gradients": STATE_BYTES[knobs.grad_dtype] * (dense + experts) * trained,
        "optimizer": per_param * optimized * trained,
        "quantized_weights": quantized,
    }
