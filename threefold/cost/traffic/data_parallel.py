"""Transfers of data parallelism by formula: gradients reduced, weights gathered, and HSDP's reduction between replicas.

Megatron's ledger uses it for ZeRO-1 and FSDP, our engine's for FSDP, whose collectives are torch's own. For the
engine's ZeRO-1, bucket by bucket, see `threefold/zero1.py`.
"""

from collections.abc import Iterator

from threefold.cost.format_support import gathered_weight_bytes
from threefold.cost.rank_params import rank_params, trained_params
from threefold.cost.traffic.transfers import Transfer
from threefold.plan.plan import Plan


def data_parallel_transfers(plan: Plan, num_microbatches: int) -> Iterator[Transfer]:
    """Gradients out and weights back: once per step under ZeRO-1, for every microbatch under FSDP."""
    layout, knobs = plan.layout, plan.knobs
    grad_bytes = 4 if knobs.grad_dtype == "fp32" and knobs.data_parallel != "zero1" else 2
    weight_bytes = gathered_weight_bytes(plan)
    is_sharded = knobs.data_parallel != "zero1"
    copies = layout.replicate if is_sharded else 1
    trained = trained_params(plan)
    gathered = rank_params(plan) if is_sharded else trained
    for part, (axis, all_ranks) in enumerate((("dp", layout.dp * layout.cp), ("edp", layout.edp))):
        ranks = max(1, all_ranks // copies)
        others = (ranks - 1) / ranks
        link = plan.link("cp" if axis == "dp" and layout.dp == 1 else axis).link
        reduced, count = grad_bytes * trained[part] * others, num_microbatches
        yield Transfer(axis, "reduce_scatter", reduced, count if is_sharded else 1, link)
        yield Transfer(axis, "all_gather", weight_bytes * gathered[part] * others, 2 * count if is_sharded else 1, link)
        replicas = min(copies, all_ranks)
        between = 2 * grad_bytes * trained[part] / ranks * (replicas - 1) / replicas
        yield Transfer(axis, "all_reduce", between, 1, link)
