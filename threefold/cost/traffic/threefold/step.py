"""The collectives of a training step of our own engine, call by call. Group names are those of the engine's own ledger.

`traffic/by_stack.py` uses it for plans with `target = "threefold"`. A test compares it with the calls of real ranks,
byte for byte.
"""

from collections import Counter
from collections.abc import Iterator

from threefold.cost.layer_work import layer_case, layer_work
from threefold.cost.traffic.data_parallel import data_parallel_transfers
from threefold.cost.traffic.dispatch import expert_transfers
from threefold.cost.traffic.threefold.calls import (
    FP64,
    INT64,
    Call,
    MicrobatchSizes,
    all_gather,
    all_reduce,
    gather_both_ways,
    microbatch_sizes,
)
from threefold.cost.traffic.threefold.context_parallel import context_parallel_calls
from threefold.cost.traffic.threefold.expert_copies import expert_copy_calls
from threefold.cost.traffic.threefold.expert_parallel import capacity_calls, expert_parallel_calls
from threefold.cost.traffic.threefold.tensor_parallel import (
    balancing_loss_calls,
    embedding_and_loss_calls,
    tensor_parallel_calls,
)
from threefold.cost.traffic.threefold.zero1 import zero1_calls
from threefold.cost.traffic.transfers import Transfer, count_layers
from threefold.cost.vision.planned_pictures import pictures_of_rank, planned_pictures
from threefold.cost.vision.saved_bytes import num_picture_states_behind, trains_part
from threefold.layout.links import Link
from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan


def threefold_transfers(plan: Plan, skew: float) -> Iterator[Transfer]:
    """All transfers of a step: exact for what the engine sends itself, estimated for FSDP (torch) and for DeepEP and
    HybridEP (packages).

    A backward is counted for every layer, also for those below the first weight that trains. Left out are what
    recompute sends once more, the whole matrices that Muon gathers, and all that is not a training step (evaluation,
    checkpoints, the consensus on whether to stop).
    """
    gpus, count = plan.layout.gpus, max(1, plan.num_microbatches)
    for (group, operation, num_bytes), number in _all_calls(plan, skew, count).items():
        yield Transfer(group, operation, num_bytes, number / gpus, _group_link(plan, group))
    if plan.knobs.data_parallel != "zero1":
        yield from data_parallel_transfers(plan, count)
    if _uses_flex_dispatcher(plan):
        for (layer, _), number in count_layers(plan).items():
            if layer.ffn == "moe":
                work = layer_work(layer_case(plan, layer))
                yield from expert_transfers(plan, work, number / plan.layout.pp * count, skew)


def _all_calls(plan: Plan, skew: float, count: int) -> Counter[Call]:
    """Calls of all ranks together in a step of `count` microbatches. Each layer, the embedding and the loss are on one
    stage."""
    layout, moe, sizes = plan.layout, plan.model.moe, microbatch_sizes(plan)
    found: Counter[Call] = Counter()

    def add(calls: Counter[Call], times: int) -> None:
        for call, number in calls.items():
            found[call] += number * times

    ranks_per_stage = layout.gpus // layout.pp
    for (layer, cp_comm), number in count_layers(plan).items():
        calls = [*tensor_parallel_calls(plan, layer, sizes), *context_parallel_calls(plan, layer, cp_comm, sizes)]
        calls += balancing_loss_calls(plan, layer, sizes)
        if layer.ffn == "moe" and moe:
            calls += capacity_calls(plan, moe, sizes)
            if not _uses_flex_dispatcher(plan):
                num_groups = ranks_per_stage // (layout.ep * layout.etp)
                add(expert_parallel_calls(plan, moe, sizes, skew), number * count * num_groups)
        add(Counter(calls), number * count * ranks_per_stage)
    add(Counter(embedding_and_loss_calls(plan, sizes)), count * ranks_per_stage)
    add(Counter(_vision_calls(plan, sizes)), count * ranks_per_stage)
    add(Counter(_pipeline_calls(plan, sizes)), count * ranks_per_stage)
    add(Counter(_step_calls(plan)), layout.gpus)
    add(expert_copy_calls(plan, sizes), 1)
    if plan.knobs.data_parallel == "zero1":
        add(zero1_calls(plan, sizes), 1)
    return found


def _uses_flex_dispatcher(plan: Plan) -> bool:
    return plan.knobs.dispatcher in ("deepep", "hybridep") and plan.layout.ep > 1


def _vision_calls(plan: Plan, sizes: MicrobatchSizes) -> Iterator[Call]:
    """The features of pictures, which ranks that share sequences deal out and gather in one call, and back again."""
    vision, pictures, size = plan.model.vision, planned_pictures(plan), plan.layout.cp * plan.layout.tp
    if vision is None or pictures is None:
        return
    num_features = 1 + min(len(vision.deepstack), plan.model.num_layers)
    rows = pictures_of_rank(plan) * pictures.tokens
    has_backward = trains_part(plan, "vision") or trains_part(plan, "projector")
    calls = gather_both_ways if has_backward else all_gather
    yield from calls("cp x tp", size, rows * num_features * plan.model.dim * sizes.element_bytes)


def _pipeline_calls(plan: Plan, sizes: MicrobatchSizes) -> Iterator[Call]:
    """The hidden states, those of the MTP depths so far and the features of pictures that later chunks need, between
    stages: forward, and their gradients."""
    layout, num_states = plan.layout, 1
    v_shaped = layout.pipeline_schedule == "dualpipev"
    for number, chunk in enumerate(plan.chunks[:-1]):
        num_states += chunk.mtp
        if chunk_rank(number, layout.pp, v_shaped) != chunk_rank(number + 1, layout.pp, v_shaped):
            states = num_states + num_picture_states_behind(plan, number)
            yield from [("pp", "send", states * sizes.tokens * plan.model.stream_dim * sizes.element_bytes)] * 2


def _step_calls(plan: Plan) -> Iterator[Call]:
    """Calls once per step: the number of labels; then, in one call, gradient norm, losses and router statistics."""
    layout, job, model = plan.layout, plan.job, plan.model
    counts = 1 if plan.shards_dynamically else 1 + plan.mtp  # of labels, for the model and each MTP depth
    yield from all_reduce("dp", layout.dp, INT64 * counts)
    depths = min(plan.mtp, 1) if model.mtp_shared else plan.mtp
    num_routers = sum(layer.ffn == "moe" for layer in [*model.layers, *model.mtp_depth * depths])
    numbers = 2 + 2 * bool(plan.mtp)
    if num_routers:
        num_losses = bool(job.aux_loss) + bool(job.seq_aux_loss) + bool(job.z_loss)
        numbers += 2 * num_losses + num_routers * (model.num_experts + 2)
    yield from all_reduce("world", layout.gpus, numbers * FP64)


def _group_link(plan: Plan, group: str) -> Link:
    """The link of a group: "domain" where the first group of this kind stays inside an NVLink domain."""
    layout = plan.layout
    if group == "cp inner":
        return "domain"
    if group == "world":
        reach = layout.gpus - 1
    else:
        axes = [{"kv": "tp", "cp outer": "cp"}.get(axis, axis) for axis in group.split(" x ")]
        reach = sum((layout.degree(axis) - 1) * layout.stride(axis) for axis in axes)
    return "domain" if reach < plan.cluster.domain_ranks else "network"
