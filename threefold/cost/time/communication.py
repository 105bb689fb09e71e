"""Seconds of a layer's communication: expert-parallel exchanges and tensor-parallel collectives.

`time/layer.py` calls these for one layer and one microbatch; all results are those of the forward. `collective_seconds`
is also what `time/data_parallel.py` uses. A link is a bandwidth times a rate of `Rates`, plus a latency.
"""

from threefold.cost.expert_load import EVEN, SkewLevel, load_of
from threefold.cost.layer_work import BF16, LayerCase, Work
from threefold.cost.rates import Rates, network_bandwidth
from threefold.cost.traffic.dispatch import dispatch_bytes
from threefold.layout.degrees import AxisLink
from threefold.plan.plan import Plan

# Bytes/s of NVLink 4. A few ranks that trade tens of megabytes are bound by NCCL's channels, whose number did not grow
# with NVLink 5: published runs with TP 2 pay the same on both.
CHANNELS_BANDWIDTH = 450e9
_LATENCY = {"domain": 1.0, "network": 2.5, "none": 0.0}  # of a link, over that within a domain


def latency_seconds(rates: Rates, link: str) -> float:
    """Seconds that an exchange over a link takes however little it moves."""
    return _LATENCY[link] * rates.latency_seconds


def dispatch_seconds(plan: Plan, work: Work, rates: Rates, skew: SkewLevel = EVEN.levels[0]) -> float:
    """One dispatch or one combine: until the rank that receives most, or sends most back, is done."""
    sent = dispatch_bytes(plan, work, skew)
    if not sent.domain and not sent.network:
        return 0.0
    rate = {"alltoall": rates.alltoall, "deepep": rates.deepep, "hybridep": rates.hybridep}.get(
        plan.knobs.dispatcher, rates.alltoall
    )
    chip = plan.chip
    inside = sent.domain / (chip.domain_bandwidth * rate)
    # DeepEP states 43 to 47 of 50 GB/s between nodes (its README, normal kernels, 2025-02). A dispatcher that is slower
    # than NCCL inside the domain is slower outside too.
    outside = sent.network / (network_bandwidth(plan, rates) * rates.network * min(1.0, rate / rates.alltoall))
    link = "network" if sent.network else "domain"
    return max(inside, outside) + 0.3 * min(inside, outside) + latency_seconds(rates, link)


def expert_copy_seconds(plan: Plan, rates: Rates) -> float:
    """The weights of copied experts of one layer out and the sums of their gradients back, in a step
    (`knobs.expert_balance`), of the rank that sends or receives most."""
    moe, copied = plan.model.moe, load_of(plan).copied
    if moe is None or not copied:
        return 0.0
    width, num_matrices = moe.latent_dim or plan.model.dim, 3 if plan.model.glu else 2
    elements = copied * num_matrices * width * moe.expert_dim / plan.layout.etp
    num_bytes = elements * (BF16 + (4 if plan.knobs.grad_dtype == "fp32" else 2))
    link = plan.link("ep").link
    rate = plan.chip.domain_bandwidth if link == "domain" else network_bandwidth(plan, rates) * rates.network
    return num_bytes / (rate * rates.alltoall) + 2 * latency_seconds(rates, link)


def routing_map_seconds(plan: Plan, work: Work, rates: Rates) -> float:
    """The routing map of all ranks, a byte for each token and expert, which HybridEP gathers before it dispatches (its
    `allgather_routing_map`)."""
    moe = plan.model.moe
    if plan.knobs.dispatcher != "hybridep" or moe is None or not work.dispatch_tokens:
        return 0.0
    payload = work.dispatch_tokens * moe.num_experts * plan.layout.ep
    return collective_seconds(plan, plan.link("ep"), payload, rates)


def collective_seconds(plan: Plan, link: AxisLink, payload: float, rates: Rates) -> float:
    """A ring all-gather or reduce-scatter. `payload` is the bytes of the whole tensor, not of a rank's shard."""
    if link.degree == 1 or payload == 0:
        return 0.0
    chip = plan.chip
    moved = payload * (link.degree - 1) / link.degree
    if link.link == "domain":
        bandwidth = min(chip.domain_bandwidth, CHANNELS_BANDWIDTH)
        return moved / (bandwidth * rates.collective) + latency_seconds(rates, "domain")
    per_node = max(1, link.in_domain)  # a ring enters and leaves each domain once, over all of its ports
    return (
        moved / per_node / (network_bandwidth(plan, rates) * (rates.ring or rates.collective))
        + latency_seconds(rates, "network") * link.degree / per_node
        + latency_seconds(rates, "domain")
    )


def expert_tensor_parallel_seconds(plan: Plan, work: Work, rates: Rates) -> float:
    """Rows gathered over the ranks that share an expert, or their outputs summed: one of the two."""
    moe = plan.model.moe
    if plan.layout.etp == 1 or moe is None:
        return 0.0
    others = work.dispatch_tokens * moe.top_k * (plan.layout.etp - 1)  # rows, in messages as large as a dispatch
    payload = BF16 * (moe.latent_dim or plan.model.dim) * others
    inside = plan.link("etp").link == "domain"
    rate = plan.chip.domain_bandwidth if inside else network_bandwidth(plan, rates)
    return payload / (rate * rates.hybridep)


def tensor_parallel_seconds(plan: Plan, case: LayerCase, work: Work, rates: Rates) -> float:
    """All-gather and reduce-scatter of the sequence around each tensor-parallel part of a layer."""
    if plan.layout.tp == 1:
        return 0.0
    layer = case.layer
    parts = (layer.mixer != "none") + (layer.ffn == "dense")
    if plan.model.moe and layer.ffn == "moe" and plan.model.moe.shared_width:
        parts += 1
    return 2 * parts * collective_seconds(plan, plan.link("tp"), work.sequence_bytes, rates)
