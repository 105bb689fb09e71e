"""The collectives of a training step under Megatron Bridge, by formula.

`traffic/by_stack.py` uses it for plans with `target = "megatron-bridge"`, and for model families that our engine does
not train. Each layer's transfers are spread evenly over pipeline stages.
"""

from collections.abc import Iterator

from threefold.cost.layer_work import BF16, LayerCase, layer_case, layer_work
from threefold.cost.traffic.dispatch import expert_transfers
from threefold.cost.traffic.transfers import Transfer, count_layers, data_parallel_transfers
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, Layer, MlaSpec


def megatron_transfers(plan: Plan, skew: float) -> Iterator[Transfer]:
    """All transfers of a step, one entry per layer kind and collective."""
    count = max(1, plan.num_microbatches)
    for (layer, cp_comm), number in count_layers(plan).items():
        yield from _layer_transfers(plan, layer, cp_comm, number / plan.layout.pp * count, skew)
    yield from _embedding_and_loss(plan, count)
    yield from _pipeline(plan, count)
    yield from data_parallel_transfers(plan, count)


def _layer_transfers(plan: Plan, layer: Layer, cp_comm: str, calls: float, skew: float) -> Iterator[Transfer]:
    case = layer_case(plan, layer)
    work = layer_work(case)
    recomputes = 1 if plan.full_recompute else 0
    if layer.ffn == "moe":
        yield from expert_transfers(plan, work, calls, skew)
    if plan.layout.tp > 1:
        parts = (layer.mixer != "none") + (layer.ffn == "dense") + _has_shared_experts(plan, layer)
        yield from _sequence_parallel(plan, work.sequence_bytes, parts * calls, recomputes)
    if plan.layout.cp > 1:
        yield from _context_parallel(plan, case, cp_comm, calls, recomputes)


def _sequence_parallel(plan: Plan, sequence_bytes: float, calls: float, recomputes: int) -> Iterator[Transfer]:
    """Gather and scatter of the sequence around each tensor-parallel part; the backward gathers the input once more."""
    num_bytes = sequence_bytes * (plan.layout.tp - 1) / plan.layout.tp
    link = plan.link("tp").link
    yield Transfer("tp", "all_gather", num_bytes, calls * (3 + recomputes), link)
    yield Transfer("tp", "reduce_scatter", num_bytes, calls * (2 + recomputes), link)


def _context_parallel(plan: Plan, case: LayerCase, cp_comm: str, calls: float, recomputes: int) -> Iterator[Transfer]:
    """Attention by its communication type; linear mixers trade sequence for heads and back."""
    cp, link = plan.layout.cp, plan.link("cp")
    column = BF16 * case.tokens / plan.layout.tp
    into, out, keys = _mixer_widths(plan, case.layer)
    both = (2 + recomputes) * calls  # forward and backward
    if case.layer.mixer in ("delta", "mamba") or cp_comm == "a2a":
        sent = column * (cp - 1) / cp
        yield Transfer("cp", "all_to_all", sent * into, both, link.link)
        yield Transfer("cp", "all_to_all", sent * out, both, link.link)
    elif cp_comm == "all_gather":
        yield Transfer("cp", "all_gather", column * keys * (cp - 1), both, link.link)
        yield Transfer("cp", "reduce_scatter", column * keys * (cp - 1), calls, link.link)
    else:
        # The hierarchical type trades heads inside a domain and passes keys from domain to domain.
        inner = link.in_domain if cp_comm == "a2a+p2p" and link.link == "network" else 1
        sent = column * (inner - 1) / inner
        yield Transfer("cp", "all_to_all", sent * into, both, "domain")
        yield Transfer("cp", "all_to_all", sent * out, both, "domain")
        # The backward passes the keys on once more, and their gradients with them.
        yield Transfer("cp", "send_kv", column * keys, (cp // inner - 1) * (both + calls), link.link)


def _mixer_widths(plan: Plan, layer: Layer) -> tuple[float, float, float]:
    """Columns that enter a mixer, that leave it, and of keys with values, before tensor parallelism shards them."""
    model = plan.model
    if layer.mixer == "delta" and model.delta:
        d = model.delta
        return 2 * d.keys + 2 * d.values + 2 * d.num_v_heads, d.values, 0
    if layer.mixer == "mamba" and model.mamba:
        m = model.mamba
        return 2 * m.inner_dim + 2 * m.num_groups * m.state_dim + m.num_heads, m.inner_dim, 0
    spec = model.attention_of(layer)
    if layer.mixer == "none" or spec is None:
        return 0, 0, 0
    if isinstance(spec, MlaSpec):
        keys = spec.num_heads * (spec.qk_dim + spec.v_dim)
        return spec.num_heads * spec.qk_dim + keys, spec.num_heads * spec.v_dim, keys
    assert isinstance(spec, GqaSpec)
    keys = 2 * max(spec.num_kv_heads, plan.layout.tp) * spec.head_dim  # with more ranks than heads, ranks hold copies
    return spec.q_dim + keys, spec.q_dim, keys


def _has_shared_experts(plan: Plan, layer: Layer) -> bool:
    return bool(layer.ffn == "moe" and plan.model.moe and plan.model.moe.shared_width)


def _embedding_and_loss(plan: Plan, count: int) -> Iterator[Transfer]:
    """Embedding and output layer under tensor parallelism count as one part; each MTP depth has both once more."""
    if plan.layout.tp > 1:
        sequence_bytes = BF16 * plan.model.dim * plan.job.micro_batch * plan.job.seq_len / plan.layout.cp
        yield from _sequence_parallel(plan, sequence_bytes, (1 + plan.mtp) * count / plan.layout.pp, 0)


def _pipeline(plan: Plan, count: int) -> Iterator[Transfer]:
    """Hidden states and their gradients between pipeline stages."""
    layout, job = plan.layout, plan.job
    if layout.pp == 1:
        return
    payload = BF16 * plan.model.dim * job.micro_batch * job.seq_len / layout.cp / layout.tp
    borders = len(plan.chunks) - 1
    if layout.pipeline_schedule == "dualpipev":
        borders -= 1  # at the tip of the V both chunks are on one rank
    yield Transfer("pp", "send", payload, 2 * borders / layout.pp * count, plan.link("pp").link)
