"""Seconds of data-parallel communication in a step: gradients reduced and weights gathered, less what compute hides.

`time/step.py` calls `data_parallel_seconds`.
"""

from threefold.cost.format_support import STATE_BYTES, gathered_weight_bytes
from threefold.cost.rank_params import rank_params, trained_params
from threefold.cost.rates import Rates
from threefold.cost.time.communication import collective_seconds
from threefold.layout.degrees import AxisLink
from threefold.plan.plan import Plan


def data_parallel_seconds(plan: Plan, microbatch_seconds: float, rates: Rates) -> float:
    """Seconds that show. ZeRO-1 hides behind the last backward and the first forward, FSDP behind every microbatch."""
    trained = trained_params(plan)
    layout, knobs, count = plan.layout, plan.knobs, max(1, plan.num_microbatches)
    is_sharded = knobs.data_parallel != "zero1"
    reduce_bytes = STATE_BYTES[knobs.grad_dtype]  # the buffer in which gradients are summed is what is reduced
    gather_bytes = gathered_weight_bytes(plan)
    copies = layout.replicate if is_sharded else 1
    dense_link = _shard_link(plan, "dp", max(1, layout.dp * layout.cp // copies), layout.tp)
    expert_link = _shard_link(plan, "edp", max(1, layout.edp // copies), layout.stride("edp"))

    def both(bytes_each: int, params: tuple[float, float]) -> float:
        dense = collective_seconds(plan, dense_link, bytes_each * params[0], rates)
        return dense + collective_seconds(plan, expert_link, bytes_each * params[1], rates)

    # FSDP gathers all weights, trained or not; ZeRO-1 only what an update has changed.
    reduce, gather = both(reduce_bytes, trained), both(gather_bytes, rank_params(plan) if is_sharded else trained)
    if is_sharded:  # gathered twice and reduced once for every microbatch
        traffic = count * (2 * gather + reduce)
        return max(0.05 * traffic, traffic - 0.9 * microbatch_seconds * count)
    hidden_reduce = microbatch_seconds * rates.dp_hidden / layout.vpp if knobs.grad_reduce_overlap else 0.0
    hidden_gather = microbatch_seconds * rates.dp_hidden / 2 / layout.vpp if knobs.param_gather_overlap else 0.0
    return max(0.1 * reduce, reduce - hidden_reduce) + max(0.1 * gather, gather - hidden_gather)


def _shard_link(plan: Plan, axis: str, degree: int, stride: int) -> AxisLink:
    """The link of the group of ranks that shard one set of parameters."""
    in_domain = max(1, min(degree, plan.cluster.domain_ranks // stride))
    return AxisLink(axis, degree, stride, in_domain, "domain" if in_domain == degree else "network")
