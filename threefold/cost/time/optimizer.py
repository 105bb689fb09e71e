"""Seconds of the optimizer step: the update of this rank's shard on the GPU and on the host, and Muon's GEMMs.

`time/step.py` calls `optimizer_seconds`.
"""

from threefold.cost.format_support import STATE_BYTES
from threefold.cost.rank_params import trained_params
from threefold.cost.rates import Rates
from threefold.cost.stack_traits import STACK_TRAITS
from threefold.plan.plan import Plan


def optimizer_seconds(plan: Plan, rates: Rates) -> tuple[float, float]:
    """Seconds of the update on the GPU, and of the part that optimizer offload runs on the host."""
    dense, experts = trained_params(plan)
    layout, knobs = plan.layout, plan.knobs
    local = dense / max(1, layout.dp * layout.cp) + experts / max(1, layout.edp)
    moment_bytes = STATE_BYTES[knobs.optimizer_dtype]
    master_bytes = 2 * 4 if knobs.master_weights else 2  # read and written, or the weight alone once more
    traffic = local * (master_bytes + 4 * moment_bytes + 4 + 2)  # moments both ways, gradient in, weight out
    offloaded = knobs.optimizer_offload
    on_gpu = traffic * (1 - offloaded) / (plan.chip.memory_bandwidth * rates.optimizer)
    on_host = offloaded * local * ((4 + 2) / plan.chip.host_bandwidth + 28 / rates.host_adam)
    return on_gpu + _muon_seconds(plan), on_host


def _muon_seconds(plan: Plan) -> float:
    """Muon's orthogonalization of whole matrices, which every data-parallel rank computes. Not calibrated: no published
    run has it."""
    model, layout, chip = plan.model, plan.layout, plan.chip
    if plan.job.optimizer != "muon" or "language" in plan.job.freeze:
        return 0.0
    traits = STACK_TRAITS[plan.target]
    fraction = traits.muon_fraction_cpu if chip.architecture == "cpu" else traits.muon_fraction_gpu
    rate = chip.peak_flops[traits.muon_format] * fraction
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
