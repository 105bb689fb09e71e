"""What Megatron Bridge sends in a step."""

from collections.abc import Iterator

from threefold.cost.exchange import dispatch_bytes
from threefold.cost.ledger.transfer import Transfer, layers_of
from threefold.cost.time import rank_params, trained_params
from threefold.cost.work import BF16, Case, Work, case_of, layer_work
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, Layer, MlaSpec


def megatron_transfers(plan: Plan, skew: float) -> Iterator[Transfer]:
    count = max(1, plan.num_microbatches)
    for (layer, mode), number in layers_of(plan).items():
        yield from _layer_transfers(plan, layer, mode, number / plan.layout.pp * count, skew)
    yield from _ends(plan, count)
    yield from _pipeline(plan, count)
    yield from data_transfers(plan, count)


def _layer_transfers(plan: Plan, layer: Layer, mode: str, calls: float, skew: float) -> Iterator[Transfer]:
    case = case_of(plan, layer)
    work = layer_work(case)
    again = 1 if plan.full_recompute else 0
    if layer.ffn == "moe":
        yield from expert_transfers(plan, work, calls, skew)
    if plan.layout.tp > 1:
        parts = (layer.mixer != "none") + (layer.ffn == "dense") + _has_shared(plan, layer)
        yield from _sequence(plan, work.sequence_bytes, parts * calls, again)
    if plan.layout.cp > 1:
        yield from _context(plan, case, mode, calls, again)


def expert_transfers(plan: Plan, work: Work, calls: float, skew: float) -> Iterator[Transfer]:
    """Forward and backward, and once more where the experts are recomputed."""
    layout, moe = plan.layout, plan.model.moe
    times = 3 if plan.full_recompute or "moe" in plan.knobs.recompute else 2
    sent = dispatch_bytes(plan, work)
    link = plan.link("ep").link
    yield Transfer("ep", "dispatch", sent.domain + sent.network, times * calls, link)
    yield Transfer("ep", "combine", (sent.domain + sent.network) * skew, times * calls, link)
    if layout.etp > 1 and moe:  # every rank of a split expert sees the rows of all of them
        rows = work.dispatch_tokens * moe.top_k * skew
        share = BF16 * (moe.latent_dim or plan.model.dim) * rows * (layout.etp - 1)
        link = plan.link("etp").link
        yield Transfer("etp", "all_gather", share, times * calls, link)
        yield Transfer("etp", "reduce_scatter", share, times * calls, link)


def _sequence(plan: Plan, whole_bytes: float, parts: float, again: int) -> Iterator[Transfer]:
    """Sequence-parallel exchange around each tensor-parallel part; backward gathers the input once more."""
    share = whole_bytes * (plan.layout.tp - 1) / plan.layout.tp
    link = plan.link("tp").link
    yield Transfer("tp", "all_gather", share, parts * (3 + again), link)
    yield Transfer("tp", "reduce_scatter", share, parts * (2 + again), link)


def _context(plan: Plan, case: Case, mode: str, calls: float, again: int) -> Iterator[Transfer]:
    """Attention by its way of communication; linear mixers trade sequence for heads and back."""
    cp, link = plan.layout.cp, plan.link("cp")
    rows = BF16 * case.tokens / plan.layout.tp
    into, out, keys = _widths(plan, case.layer)
    both = (2 + again) * calls  # forward and backward
    if case.layer.mixer in ("delta", "mamba") or mode == "a2a":
        share = rows * (cp - 1) / cp
        yield Transfer("cp", "all_to_all", share * into, both, link.link)
        yield Transfer("cp", "all_to_all", share * out, both, link.link)
    elif mode == "all_gather":
        yield Transfer("cp", "all_gather", rows * keys * (cp - 1), both, link.link)
        yield Transfer("cp", "reduce_scatter", rows * keys * (cp - 1), calls, link.link)
    else:
        # The hierarchical way trades heads inside a domain and passes keys from domain to domain.
        inner = link.in_domain if mode == "a2a+p2p" and link.link == "network" else 1
        share = rows * (inner - 1) / inner
        yield Transfer("cp", "all_to_all", share * into, both, "domain")
        yield Transfer("cp", "all_to_all", share * out, both, "domain")
        # Backward passes the keys on again, and their gradients with them.
        yield Transfer("cp", "send_kv", rows * keys, (cp // inner - 1) * (both + calls), link.link)


def _widths(plan: Plan, layer: Layer) -> tuple[float, float, float]:
    """Columns that enter a mixer, leave it, and of keys with values, before tensor parallel cuts them."""
    model = plan.model
    if layer.mixer == "delta" and model.delta:
        d = model.delta
        return 2 * d.keys + 2 * d.values + 2 * d.num_v_heads, d.values, 0
    if layer.mixer == "mamba" and model.mamba:
        m = model.mamba
        return 2 * m.inner_dim + 2 * m.num_groups * m.state_dim + m.num_heads, m.inner_dim, 0
    spec = model.local_attention if layer.mixer == "window" else model.attention
    if layer.mixer == "none" or spec is None:
        return 0, 0, 0
    if isinstance(spec, MlaSpec):
        keys = spec.num_heads * (spec.qk_dim + spec.v_dim)
        return spec.num_heads * spec.qk_dim + keys, spec.num_heads * spec.v_dim, keys
    assert isinstance(spec, GqaSpec)
    keys = 2 * max(spec.num_kv_heads, plan.layout.tp) * spec.head_dim  # with more ranks than heads, ranks hold copies
    return spec.q_dim + keys, spec.q_dim, keys


def _has_shared(plan: Plan, layer: Layer) -> bool:
    return bool(layer.ffn == "moe" and plan.model.moe and plan.model.moe.shared_width)


def _ends(plan: Plan, count: int) -> Iterator[Transfer]:
    """Embedding and output layer under tensor parallel, together one part; each MTP depth has both again."""
    if plan.layout.tp > 1:
        whole = BF16 * plan.model.dim * plan.job.micro_batch * plan.job.seq_len / plan.layout.cp
        yield from _sequence(plan, whole, (1 + plan.mtp) * count / plan.layout.pp, 0)


def _pipeline(plan: Plan, count: int) -> Iterator[Transfer]:
    layout, job = plan.layout, plan.job
    if layout.pp == 1:
        return
    payload = BF16 * plan.model.dim * job.micro_batch * job.seq_len / layout.cp / layout.tp
    borders = len(plan.chunks) - 1
    if layout.pipeline_schedule == "dualpipev":
        borders -= 1  # at the turn of the V both chunks are on one rank
    yield Transfer("pp", "send", payload, 2 * borders / layout.pp * count, plan.link("pp").link)


def data_transfers(plan: Plan, count: int) -> Iterator[Transfer]:
    """Gradients out and weights back: once a step, or for every microbatch where weights are sharded."""
    layout, knobs = plan.layout, plan.knobs
    grads = 4 if knobs.grad_dtype == "fp32" and knobs.data_parallel != "zero1" else 2
    weights = 1 if knobs.fp8_params and plan.low_precision else 2
    sharded = knobs.data_parallel != "zero1"
    copies = layout.replicate if sharded else 1
    trained = trained_params(plan)
    gathered = rank_params(plan) if sharded else trained
    for part, (axis, all_ranks) in enumerate((("dp", layout.dp * layout.cp), ("edp", layout.edp))):
        ranks = max(1, all_ranks // copies)
        share = (ranks - 1) / ranks
        link = plan.link("cp" if axis == "dp" and layout.dp == 1 else axis).link
        yield Transfer(axis, "reduce_scatter", grads * trained[part] * share, count if sharded else 1, link)
        yield Transfer(axis, "all_gather", weights * gathered[part] * share, 2 * count if sharded else 1, link)
        between = min(copies, all_ranks)
        yield Transfer(axis, "all_reduce", 2 * grads * trained[part] / ranks * (between - 1) / between, 1, link)
