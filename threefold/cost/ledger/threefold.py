"""What our engine sends in a step, call by call. The group names are those of its own ledger."""

from collections import Counter
from collections.abc import Iterator

from threefold.cost.ledger.buckets import bucket_calls
from threefold.cost.ledger.calls import DOUBLE, LONG, Call, Sizes, all_reduce, sizes_of
from threefold.cost.ledger.context import context_calls
from threefold.cost.ledger.experts import capacity_calls, expert_calls
from threefold.cost.ledger.megatron import data_transfers, expert_transfers
from threefold.cost.ledger.tokens import balance_calls, end_calls, tensor_calls
from threefold.cost.ledger.transfer import Transfer, layers_of
from threefold.cost.work import case_of, layer_work
from threefold.layout.links import Link
from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan


def threefold_transfers(plan: Plan, skew: float) -> Iterator[Transfer]:
    """Exact for what the engine sends itself; sharded weights (torch) and flex dispatchers (packages) are estimated.

    Left out: what recompute sends again, the whole matrices that Muon gathers, and all that is not a training step
    (evaluation, checkpoints, the question whether to stop).
    """
    gpus, count = plan.layout.gpus, max(1, plan.num_microbatches)
    for (group, operation, num_bytes), number in _calls(plan, skew, count).items():
        yield Transfer(group, operation, num_bytes, number / gpus, link_of(plan, group))
    if plan.knobs.data_parallel != "zero1":
        yield from data_transfers(plan, count)
    if _is_flex(plan):
        for (layer, _), number in layers_of(plan).items():
            if layer.ffn == "moe":
                work = layer_work(case_of(plan, layer))
                yield from expert_transfers(plan, work, number / plan.layout.pp * count, skew)


def _calls(plan: Plan, skew: float, count: int) -> Counter[Call]:
    """Of all ranks together; `count` microbatches. Each layer, the embedding and the loss are on one stage."""
    layout, moe, sizes = plan.layout, plan.model.moe, sizes_of(plan)
    found: Counter[Call] = Counter()

    def add(calls: Counter[Call], times: int) -> None:
        for call, number in calls.items():
            found[call] += number * times

    stage = layout.gpus // layout.pp
    for (layer, kind), number in layers_of(plan).items():
        calls = [*tensor_calls(plan, layer, sizes), *context_calls(plan, layer, kind, sizes)]
        calls += balance_calls(plan, layer, sizes)
        if layer.ffn == "moe" and moe:
            calls += capacity_calls(plan, moe, sizes)
            if not _is_flex(plan):
                groups = stage // (layout.ep * layout.etp)
                add(expert_calls(plan, moe, sizes, skew), number * count * groups)
        add(Counter(calls), number * count * stage)
    add(Counter(end_calls(plan, sizes)), count * stage)
    add(Counter(_border_calls(plan, sizes)), count * stage)
    add(Counter(_step_calls(plan)), layout.gpus)
    if plan.knobs.data_parallel == "zero1":
        add(bucket_calls(plan, sizes), 1)
    return found


def _is_flex(plan: Plan) -> bool:
    return plan.knobs.dispatcher in ("deepep", "hybridep") and plan.layout.ep > 1


def _border_calls(plan: Plan, sizes: Sizes) -> Iterator[Call]:
    """The hidden state, and those of the MTP depths so far; forward, and their gradients."""
    layout, states = plan.layout, 1
    v_shaped = layout.pipeline_schedule == "dualpipev"
    for number, chunk in enumerate(plan.chunks[:-1]):
        states += chunk.mtp
        if chunk_rank(number, layout.pp, v_shaped) != chunk_rank(number + 1, layout.pp, v_shaped):
            yield from [("pp", "send", states * sizes.tokens * plan.model.dim * sizes.width)] * 2


def _step_calls(plan: Plan) -> Iterator[Call]:
    """How many labels the step has; then, in one call, the norm, the losses and what the routers did."""
    layout, job, model = plan.layout, plan.job, plan.model
    yield from all_reduce("dp", layout.dp, LONG)
    sets = min(plan.mtp, 1) if model.mtp_shared else plan.mtp
    routers = sum(layer.ffn == "moe" for layer in [*model.layers, *model.mtp_depth * sets])
    numbers = 2 + 2 * bool(plan.mtp)
    if routers:
        wanted = bool(job.aux_loss) + bool(job.seq_aux_loss) + bool(job.z_loss)
        numbers += 2 * wanted + routers * (model.num_experts + 2)
    yield from all_reduce("world", layout.gpus, numbers * DOUBLE)


def link_of(plan: Plan, group: str) -> Link:
    """Whether the first such group stays inside a domain."""
    layout = plan.layout
    if group == "cp inner":
        return "domain"
    if group == "world":
        reach = layout.gpus - 1
    else:
        axes = [{"kv": "tp", "cp outer": "cp"}.get(axis, axis) for axis in group.split(" x ")]
        reach = sum((layout.degree(axis) - 1) * layout.stride(axis) for axis in axes)
    return "domain" if reach < plan.cluster.domain_ranks else "network"
