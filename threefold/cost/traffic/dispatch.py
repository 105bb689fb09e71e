"""Bytes that a token dispatcher sends, by formula: alltoall, DeepEP and HybridEP, in expectation over balanced routing.

Megatron's ledger uses it for every dispatcher, our engine's for DeepEP and HybridEP, whose transport is in packages;
`time/communication.py` turns the bytes into seconds for both stacks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from threefold.cost.expert_load import EVEN, SkewLevel
from threefold.cost.layer_work import BF16, Work
from threefold.cost.traffic.transfers import Transfer
from threefold.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes that a rank sends in one exchange, by link."""

    domain: float  # inside its NVLink domain
    network: float


def dispatch_bytes(plan: Plan, work: Work, skew: SkewLevel = EVEN.levels[0]) -> LinkBytes:
    """Bytes of one dispatch or one combine, to the rank and to the domain that receive most."""
    moe, ep = plan.model.moe, plan.layout.ep
    if not moe or ep == 1:
        return LinkBytes(0.0, 0.0)
    link = plan.link("ep")
    deduplicates = plan.knobs.dispatcher in ("deepep", "hybridep")
    inside, outside = _token_copies(ep, link.in_domain, moe.top_k, (moe.num_groups, moe.top_groups), deduplicates)
    token = BF16 * (moe.latent_dim or plan.model.dim)
    if skew != EVEN.levels[0]:
        domains = ep / link.in_domain
        inside *= _reached(skew.rank, ep, moe.top_k) if deduplicates else skew.rank
        outside *= _reached(skew.domain, domains, moe.top_k) if deduplicates and domains > 1 else skew.rank
    return LinkBytes(work.dispatch_tokens * token * inside, work.dispatch_tokens * token * outside)


def _reached(skew: float, places: float, top_k: int) -> float:
    """Tokens of which some copy goes to a place, over the mean: the dispatcher sends it one copy of each."""
    return float((1 - (1 - min(1.0, skew / places)) ** top_k) / (1 - (1 - 1 / places) ** top_k))


@lru_cache(maxsize=4096)
def _token_copies(
    ep: int, in_domain: int, top_k: int, groups: tuple[int, int], deduplicates: bool
) -> tuple[float, float]:
    """Copies of a token that are sent inside the domain and out of it, on average.

    alltoall sends one copy for each chosen expert. DeepEP and HybridEP deduplicate: one copy to each rank inside the
    domain and one to each other domain, which passes it on. `groups` are the router's expert groups, all and chosen.
    """
    if not deduplicates:
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


def expert_transfers(plan: Plan, work: Work, calls: float, skew: float) -> Iterator[Transfer]:
    """Dispatch and combine of `calls` layers, and the exchange between slices of an expert (ETP): forward and backward,
    and once more where the experts are recomputed."""
    layout, moe = plan.layout, plan.model.moe
    times = 3 if plan.full_recompute or "moe" in plan.knobs.recompute else 2
    sent = dispatch_bytes(plan, work)
    link = plan.link("ep").link
    yield Transfer("ep", "dispatch", sent.domain + sent.network, times * calls, link)
    yield Transfer("ep", "combine", (sent.domain + sent.network) * skew, times * calls, link)
    if layout.etp > 1 and moe:  # every slice of an expert gets the rows of all slices
        rows = work.dispatch_tokens * moe.top_k * skew
        num_bytes = BF16 * (moe.latent_dim or plan.model.dim) * rows * (layout.etp - 1)
        link = plan.link("etp").link
        yield Transfer("etp", "all_gather", num_bytes, times * calls, link)
        yield Transfer("etp", "reduce_scatter", num_bytes, times * calls, link)
