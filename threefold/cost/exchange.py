"""Communication of one layer: bytes by link, and the seconds they take."""

from dataclasses import dataclass
from functools import lru_cache

from threefold.cost.rates import Rates
from threefold.cost.work import BF16, Case, Work
from threefold.layout.links import AxisLink
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MlaSpec

LATENCY_SECONDS = {"domain": 10e-6, "network": 25e-6, "none": 0.0}


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes a rank sends in one exchange, by link."""

    domain: float
    network: float


@lru_cache(maxsize=4096)
def _reach(ep: int, in_domain: int, top_k: int, groups: tuple[int, int], dedup: bool) -> tuple[float, float]:
    """Copies of a token sent inside the domain and out of it, on average.

    alltoall sends one copy for each chosen expert. The flex dispatchers send one copy to each rank inside the
    domain and one to each other domain, which passes it on.
    """
    if not dedup:
        return top_k * (in_domain - 1) / ep, top_k * (ep - in_domain) / ep
    inside = (in_domain - 1) * (1 - (1 - 1 / ep) ** top_k)
    domains = ep / in_domain
    if domains <= 1:
        return inside, 0.0
    total, allowed = groups
    reachable = (domains - 1) * min(1.0, max(1.0, allowed / total * domains) / domains) if total > 1 else domains - 1
    hit = 1 - (1 - 1 / domains) ** top_k
    outside = min(reachable, (domains - 1) * hit)
    return inside, outside


def dispatch_bytes(plan: Plan, work: Work) -> Sent:
    """Bytes of one dispatch or one combine."""
    moe, ep = plan.model.moe, plan.layout.ep
    if not moe or ep == 1:
        return Sent(0.0, 0.0)
    link = plan.link("ep")
    dedup = plan.knobs.dispatcher in ("deepep", "hybridep")
    inside, outside = _reach(ep, link.in_domain, moe.top_k, (moe.num_groups, moe.top_groups), dedup)
    token = BF16 * (moe.latent_dim or plan.model.dim)
    return Sent(work.dispatch_tokens * token * inside, work.dispatch_tokens * token * outside)


def dispatch_seconds(plan: Plan, work: Work, rates: Rates) -> float:
    """One dispatch or one combine."""
    sent = dispatch_bytes(plan, work)
    if not sent.domain and not sent.network:
        return 0.0
    share = {"alltoall": rates.alltoall, "deepep": rates.deepep, "hybridep": rates.hybridep}.get(
        plan.knobs.dispatcher, rates.alltoall
    )
    chip = plan.chip
    inside = sent.domain / (chip.domain_bandwidth * share)
    outside = sent.network / (chip.network_bandwidth * share * rates.network)
    link = "network" if sent.network else "domain"
    return max(inside, outside) + 0.3 * min(inside, outside) + LATENCY_SECONDS[link]


def collective_seconds(plan: Plan, link: AxisLink, payload: float, rates: Rates) -> float:
    """A ring all-gather or reduce-scatter of `payload` bytes (the whole, not the share)."""
    if link.degree == 1 or payload == 0:
        return 0.0
    chip = plan.chip
    moved = payload * (link.degree - 1) / link.degree
    if link.link == "domain":
        return moved / (chip.domain_bandwidth * rates.collective) + LATENCY_SECONDS["domain"]
    per_node = max(1, link.in_domain)  # a ring enters and leaves each domain once, over all of its ports
    return moved / per_node / (chip.network_bandwidth * rates.collective) + LATENCY_SECONDS["network"] * link.degree


def expert_tensor_seconds(plan: Plan, work: Work, rates: Rates) -> float:
    """Rows gathered over the ranks that share an expert, or their outputs summed: one of the two, forward."""
    moe = plan.model.moe
    if plan.layout.etp == 1 or moe is None:
        return 0.0
    others = work.dispatch_tokens * moe.top_k * (plan.layout.etp - 1)  # rows, in messages as large as a dispatch
    payload = BF16 * (moe.latent_dim or plan.model.dim) * others
    inside = plan.link("etp").link == "domain"
    rate = plan.chip.domain_bandwidth if inside else plan.chip.network_bandwidth
    return payload / (rate * rates.hybridep)


def tensor_seconds(plan: Plan, case: Case, work: Work, rates: Rates) -> float:
    """All-gather and reduce-scatter of the sequence around each tensor-parallel part, forward."""
    if plan.layout.tp == 1:
        return 0.0
    layer = case.layer
    parts = (layer.mixer != "none") + (layer.ffn == "dense")
    if plan.model.moe and layer.ffn == "moe" and plan.model.moe.shared_width:
        parts += 1
    return 2 * parts * collective_seconds(plan, plan.link("tp"), work.sequence_bytes, rates)


@dataclass(frozen=True, slots=True)
class Ring:
    """Context-parallel communication of one layer, forward: what can hide behind attention and what cannot."""

    hidden: float
    exposed: float


def context_seconds(plan: Plan, case: Case, rates: Rates) -> Ring:
    """Keys and values that travel, by communication type. Network hops are point to point, one port a GPU."""
    cp, model = plan.layout.cp, plan.model
    if cp == 1:
        return Ring(0.0, 0.0)
    rows = BF16 * case.tokens / plan.layout.tp
    if case.layer.mixer == "delta" and model.delta:  # heads for sequence and back
        return Ring(0.0, _heads_exchange(plan, rows * (3 * model.delta.keys + 3 * model.delta.values), rates))
    if case.layer.mixer == "mamba" and model.mamba:
        return Ring(0.0, _heads_exchange(plan, rows * 3 * model.mamba.inner_dim, rates))
    if case.layer.mixer not in ("attention", "window"):
        return Ring(0.0, 0.0)
    queries, keys = _attention_widths(plan)
    mode = plan.knobs.cp_comm if isinstance(plan.knobs.cp_comm, str) else plan.knobs.cp_comm[0]
    link, chip = plan.link("cp"), plan.chip
    inside, outside = chip.domain_bandwidth * rates.hybridep, chip.network_bandwidth * rates.network * 0.9
    if mode == "a2a":
        return Ring(0.0, _heads_exchange(plan, rows * 2 * (queries + keys), rates))
    if mode == "all_gather":
        return Ring(0.0, collective_seconds(plan, link, rows * keys * cp, rates))
    if mode == "a2a+p2p" and link.link == "network" and link.in_domain > 1:
        laps = cp // link.in_domain - 1
        return Ring(laps * rows * keys / outside, rows * 2 * (queries + keys) / inside)
    hop = rows * keys / (inside if link.link == "domain" else outside) + LATENCY_SECONDS[link.link]
    return Ring((cp - 1) * hop, 0.0)


def _attention_widths(plan: Plan) -> tuple[float, float]:
    """Width of queries, and of keys with values, as attention sees them."""
    spec = plan.model.attention
    if isinstance(spec, MlaSpec):
        return float(spec.num_heads * spec.qk_dim), float(spec.num_heads * (spec.qk_dim + spec.v_dim))
    if isinstance(spec, GqaSpec):
        return float(spec.q_dim), 2.0 * spec.kv_dim
    return 0.0, 0.0


def _heads_exchange(plan: Plan, payload: float, rates: Rates) -> float:
    """All-to-all of `payload` bytes a rank: heads traded for sequence."""
    link, chip = plan.link("cp"), plan.chip
    remote = (link.degree - link.in_domain) / link.degree
    local = (link.in_domain - 1) / link.degree
    inside = payload * local / (chip.domain_bandwidth * rates.alltoall)
    outside = payload * remote / (chip.network_bandwidth * rates.alltoall * rates.network)
    return max(inside, outside) + LATENCY_SECONDS[link.link]
