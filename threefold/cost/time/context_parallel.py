"""Seconds of context parallelism in one layer: exchanges of keys and values, or of MLA's latents, and their GEMMs.

`time/layer.py` calls `context_parallel_seconds` and `latent_expansion_seconds`. Where ranks exchange latents, each
expands those of other ranks for its own heads, in the forward and again in the backward.
"""

from dataclasses import dataclass

from threefold.cost.delta_rule import cp_comm_of
from threefold.cost.format_support import gemm_precision
from threefold.cost.layer_work import BF16, LayerCase
from threefold.cost.rates import Rates, gemm_rate, network_bandwidth
from threefold.cost.time.communication import collective_seconds, latency_seconds
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, MlaSpec


@dataclass(frozen=True, slots=True)
class ContextSeconds:
    """Context-parallel communication of one layer, forward and backward together."""

    hidden: float  # seconds that can hide behind attention
    exposed: float  # seconds that cannot


def context_parallel_seconds(plan: Plan, case: LayerCase, rates: Rates) -> ContextSeconds:
    """Communication by type. Keys and values travel in the forward, once more in the backward, and so do their
    gradients; an exchange that is not hidden counts two and a half times."""
    if plan.layout.cp == 1:
        return ContextSeconds(0.0, 0.0)
    if plan.exchanges_latents and case.layer.mixer == "attention":
        return _latent_exchange_seconds(plan, case, rates)
    forward = _forward_seconds(plan, case, rates)
    again = _exchanges_again(plan, case) * forward.exposed * 2 / 3  # without the output
    return ContextSeconds(3 * forward.hidden, 2.5 * forward.exposed + again)


def _exchanges_again(plan: Plan, case: LayerCase) -> bool:
    """Whether our engine trades recomputed queries, keys and values for heads once more in the backward."""
    recomputes_heads = "mla_up_proj" in plan.knobs.recompute and isinstance(plan.model.attention, MlaSpec)
    return plan.target == "threefold" and case.layer.mixer == "attention" and recomputes_heads


def _forward_seconds(plan: Plan, case: LayerCase, rates: Rates) -> ContextSeconds:
    """Keys and values that travel in the forward. Network hops are point to point, one port per GPU."""
    cp, model = plan.layout.cp, plan.model
    column = BF16 * case.tokens / plan.layout.tp
    if case.layer.mixer == "delta" and model.delta:  # heads for sequence and back
        payload = column * (3 * model.delta.keys + 3 * model.delta.values)
        return ContextSeconds(0.0, _heads_exchange_seconds(plan, payload, rates))
    if case.layer.mixer == "mamba" and model.mamba:
        return ContextSeconds(0.0, _heads_exchange_seconds(plan, column * 3 * model.mamba.inner_dim, rates))
    if model.attention_of(case.layer) is None:
        return ContextSeconds(0.0, 0.0)
    queries, keys = _attention_widths(plan)
    cp_comm = cp_comm_of(plan, case.layer.mixer)
    link, chip = plan.link("cp"), plan.chip
    inside, outside = chip.domain_bandwidth * rates.hybridep, network_bandwidth(plan, rates) * rates.network
    if cp_comm == "a2a":
        return ContextSeconds(0.0, _heads_exchange_seconds(plan, column * 2 * (queries + keys), rates))
    if cp_comm == "all_gather":
        return ContextSeconds(0.0, collective_seconds(plan, link, column * keys * cp, rates))
    if cp_comm == "a2a+p2p" and plan.cp_inner > 1:
        laps = cp // plan.cp_inner - 1
        return ContextSeconds(laps * column * keys / outside, column * 2 * (queries + keys) / inside)
    hop = column * keys / (inside if link.link == "domain" else outside) + latency_seconds(rates, link.link)
    return ContextSeconds((cp - 1) * hop, 0.0)


def _attention_widths(plan: Plan) -> tuple[float, float]:
    """The width of queries, and of keys with values, as attention reads them."""
    spec = plan.model.attention
    if isinstance(spec, MlaSpec):
        return float(spec.num_heads * spec.qk_dim), float(spec.num_heads * (spec.qk_dim + spec.v_dim))
    if isinstance(spec, GqaSpec):
        return float(spec.q_dim), 2.0 * spec.kv_dim
    return 0.0, 0.0


def _heads_exchange_seconds(plan: Plan, payload: float, rates: Rates) -> float:
    """An all-to-all of `payload` bytes per rank that trades heads for sequence."""
    link, chip = plan.link("cp"), plan.chip
    remote = (link.degree - link.in_domain) / link.degree
    local = (link.in_domain - 1) / link.degree
    inside = payload * local / (chip.domain_bandwidth * rates.alltoall)
    outside = payload * remote / (network_bandwidth(plan, rates) * rates.network)
    return max(inside, outside) + latency_seconds(rates, link.link)


def _latent_groups(plan: Plan) -> tuple[int, int]:
    """Ranks that gather latents and share the heads, and ranks whose latents arrive from outside."""
    cp, cp_comm = plan.layout.cp, cp_comm_of(plan, "attention")
    inner = {"a2a": cp, "a2a+p2p": plan.cp_inner}.get(cp_comm, 1)
    return inner, cp // inner


def _latent_exchange_seconds(plan: Plan, case: LayerCase, rates: Rates) -> ContextSeconds:
    """Latents go round the outer ring, gradients of them in fp32. The inner ranks gather latents in both passes, sum
    gradients in fp32 over ranks, and trade the output for the sequence once, in the backward with its gradient."""
    spec, chip, link = plan.model.attention, plan.chip, plan.link("cp")
    assert isinstance(spec, MlaSpec)
    inner, outer = _latent_groups(plan)
    column = BF16 * case.tokens  # latents are not sharded over tp
    latents, queries = column * (spec.kv_rank + spec.rope_dim), column * (spec.q_rank or plan.model.dim)
    output = column / plan.layout.tp * spec.num_heads * spec.v_dim
    domain = chip.domain_bandwidth * rates.collective
    network = network_bandwidth(plan, rates) * rates.network
    inside = domain if inner <= link.in_domain else network
    outside = domain if link.link == "domain" else network
    gathered = (inner - 1) * (queries + outer * latents)
    exposed = (4 * gathered + 3 * output * (inner - 1) / inner) / inside
    exposed += (2 * outer + 5) * latency_seconds(rates, "domain") if inner > 1 else 0.0
    ring = 4 * (outer - 1) * (latents / outside + latency_seconds(rates, link.link))
    if cp_comm_of(plan, "attention") == "all_gather":
        return ContextSeconds(0.0, exposed + ring)
    return ContextSeconds(ring, exposed)


@dataclass(frozen=True, slots=True)
class ExpansionSeconds:
    """What a layer spends on latents beyond the one expansion of its own tokens; zero where heads are exchanged."""

    gemm: float = 0.0  # latents of other ranks in the forward, and their two gradient GEMMs
    recompute: float = 0.0  # every expansion once more in the backward
    moved_bytes: float = 0.0  # keys and values that are put together


def latent_expansion_seconds(plan: Plan, case: LayerCase, rates: Rates) -> ExpansionSeconds:
    """The first rank attends to every token, so that it expands the latents of all outer ranks for its own heads."""
    spec = plan.model.attention
    if not plan.exchanges_latents or case.layer.mixer != "attention" or not isinstance(spec, MlaSpec):
        return ExpansionSeconds()
    _, outer = _latent_groups(plan)
    tokens = case.tokens / plan.layout.tp
    heads = spec.num_heads
    rate = gemm_rate(rates, plan, gemm_precision(plan), case.tokens)
    queries = 2 * tokens * heads * (spec.q_rank or plan.model.dim) * spec.qk_dim / rate
    keys = 2 * tokens * heads * spec.kv_rank * (spec.nope_dim + spec.v_dim) / rate
    moved = BF16 * 2 * tokens * heads * (spec.qk_dim + spec.v_dim) * (4 * outer - 3)
    return ExpansionSeconds(3 * (outer - 1) * keys, queries + outer * keys, moved)
