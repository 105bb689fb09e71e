"""Seconds of the optimizer step: the update of this rank's shard on the GPU, optimizer offload, and Muon's GEMMs.

`time/step.py` calls `optimizer_seconds`.
"""

from threefold.cost.format_support import (
    BF16_BYTES,
    STATE_BYTES,
    master_weight_bytes,
    muon_format,
    runs_fused_experts,
    writes_gradients_once,
)
from threefold.cost.rank_params import trained_params
from threefold.cost.rates import Rates
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.cost.time.offload import exposed_state_seconds
from threefold.plan.plan import Plan


def optimizer_seconds(plan: Plan, rates: Rates, forward: float) -> tuple[float, float]:
    """Seconds of the update on the GPU, and those that optimizer offload adds to a step.

    `forward` are the seconds of a rank's forward of one microbatch, behind which our own engine hides a part.
    """
    dense, experts = trained_params(plan)
    layout, knobs = plan.layout, plan.knobs
    dense, experts = dense / max(1, layout.dp * layout.cp), experts / max(1, layout.edp)
    local = dense + experts
    moment_bytes = STATE_BYTES[knobs.optimizer_dtype]
    # Master weights are read and written. Without them, and with their remainders, the weight is read once more.
    master_bytes = 2 * master_weight_bytes(plan) + (0 if master_weight_bytes(plan) == 4 else 2)
    traffic = local * (master_bytes + 4 * moment_bytes + 2)  # moments both ways, weight out
    traffic += _gradient_bytes(plan, dense, experts)
    traits = STACK_TRAITS[plan.target]
    is_elsewhere = traits.updates_on_host or plan.chip.architecture != "cpu"  # our states on a CPU are where they were
    offloaded = knobs.optimizer_offload if is_elsewhere else 0.0
    on_gpu = traffic * (1 - offloaded) / (plan.chip.memory_bandwidth * rates.optimizer)
    if traits.updates_on_host:
        offload = offloaded * local * ((4 + 2) / plan.chip.host_bandwidth + 28 / rates.host_adam)
    else:
        offload = exposed_state_seconds(plan, rates, offloaded * local, forward)
    return on_gpu + _muon_seconds(plan), offload


def _gradient_bytes(plan: Plan, dense: float, experts: float) -> float:
    """Bytes of gradients that the update and their norm read, of so many parameters.

    Our engine's kernels on Hopper sum the squares of expert gradients as they write them, if nothing is added later.
    """
    if STACK_TRAITS[plan.target].optimizer_rate_has_norm:
        return 4 * (dense + experts)
    once = writes_gradients_once(plan)
    element_bytes = BF16_BYTES if once and plan.knobs.precision != "fp32" else STATE_BYTES[plan.knobs.grad_dtype]
    has_squares = once and plan.chip.architecture == "hopper" and runs_fused_experts(plan) and not plan.low_precision
    in_norm = dense if has_squares else dense + experts
    return element_bytes * (dense + experts + in_norm)


def _muon_seconds(plan: Plan) -> float:
    """Muon's orthogonalization of whole matrices, which every data-parallel rank computes. Not calibrated: no published
    run has it."""
    model, layout, chip = plan.model, plan.layout, plan.chip
    if plan.job.optimizer != "muon" or "language" in plan.job.freeze:
        return 0.0
    traits, kind = STACK_TRAITS[plan.target], muon_format(plan)
    fractions = traits.muon_fractions_cpu if chip.architecture == "cpu" else traits.muon_fractions_gpu
    rate = chip.peak_flops[kind] * fractions[kind]
    dense, experts = trained_params(plan)
    tables = 2 * model.vocab * model.dim / layout.tp / layout.pp
    expert_side = model.moe.expert_dim * 2 if model.moe else model.dense_dim
    flops = _orthogonalization_flops(model.dim, expert_side) * experts
    flops += _orthogonalization_flops(model.dim, model.dim) * max(0.0, dense - tables)
    return flops / rate


def _orthogonalization_flops(one: int, other: int) -> float:
    """FLOPs per element of a matrix with these sides, in five Newton-Schulz iterations: the Gram matrix of the shorter
    side, its square, and the product with the matrix."""
    short, long = sorted((one, other))
    return 5 * (4 * short + 2 * short**2 / long)
