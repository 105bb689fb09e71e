"""The collectives of a training step of our own engine, call by call. Group names are those of the engine's own ledger.

`traffic/by_stack.py` uses it for plans with `target = "threefold"`. A test compares it with the calls of real ranks,
byte for byte.
"""

from collections import Counter
from collections.abc import Iterator

from threefold.cost.layer_work import layer_case, layer_work
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
    reduce_scatter,
    scatter_both_ways,
)
from threefold.cost.traffic.threefold.context_parallel import context_parallel_calls
from threefold.cost.traffic.threefold.expert_copies import expert_copy_calls
from threefold.cost.traffic.threefold.expert_parallel import capacity_calls, expert_parallel_calls
from threefold.cost.traffic.threefold.zero1 import zero1_calls
from threefold.cost.traffic.transfers import Transfer, count_layers, data_parallel_transfers
from threefold.cost.trained_weights import saved_inputs
from threefold.cost.vision import (
    num_picture_states_behind,
    pictures_of_rank,
    planned_pictures,
    trains_part,
)
from threefold.layout.degrees import Link
from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan
from threefold.spec.model import CompressedSpec, GqaSpec, Layer, MlaSpec


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


# Logits in fp32 that the loss holds at a time, in whole tiles of tokens.
_LOGITS_BYTES = {"cpu": 256 * 2**20}
_GPU_LOGITS_BYTES = 5 * 2**30
_TILE, _MIN_TOKENS = 128, 64


def tensor_parallel_calls(plan: Plan, layer: Layer, sizes: MicrobatchSizes) -> Iterator[Call]:
    """A sharded module gathers the sequence (MLA only its latents) and scatters the sum of its outputs."""
    tp, model = plan.layout.tp, plan.model
    column = sizes.tokens * sizes.element_bytes
    spec = model.attention_of(layer)
    if isinstance(spec, CompressedSpec):
        yield from gather_both_ways("tp", tp, column * (spec.q_rank + spec.head_dim + 2 * spec.pooled_columns))
        if (index := spec.indexer) is not None:  # what its entries are pooled from, and its weights
            pooled = index.head_dim * (4 if spec.overlaps else 2)
            yield from all_gather("tp", tp, column * (pooled + index.num_heads))
        yield from _around_gemm(plan, column * model.dim)
    elif isinstance(spec, MlaSpec):
        latents = (spec.q_rank or model.dim) + spec.kv_rank + spec.rope_dim
        yield from gather_both_ways("tp", tp, column * latents)
        if spec.indexer is not None:  # its keys and weights, which have no gradient
            yield from all_gather("tp", tp, column * (spec.indexer.head_dim + spec.indexer.num_heads))
        yield from _around_gemm(plan, column * model.dim)
    elif layer.mixer != "none":
        yield from 2 * _around_gemm(plan, column * model.dim)
    if isinstance(spec, GqaSpec) and spec.qk_norm_over == "projection":
        # The squares of a token's queries and of its keys, and one number of each one's gradient.
        yield from 4 * all_reduce("tp", tp, sizes.sum_bytes * sizes.tokens * tp)
    for _ in range((layer.ffn == "dense") + _has_shared_experts(plan, layer)):
        yield from 2 * _around_gemm(plan, column * model.dim)


def _around_gemm(plan: Plan, shard_bytes: int) -> list[Call]:
    """The gather before a GEMM or the scatter after it, and its transpose in the backward. `tp_overlap` sends shards
    round a ring instead."""
    tp = plan.layout.tp
    is_ring = plan.knobs.tp_overlap
    return [("tp", "send", shard_bytes)] * (2 * (tp - 1)) if is_ring else gather_both_ways("tp", tp, shard_bytes)


def _has_shared_experts(plan: Plan, layer: Layer) -> bool:
    return bool(layer.ffn == "moe" and plan.model.moe and plan.model.moe.num_shared)


def balancing_loss_calls(plan: Plan, layer: Layer, sizes: MicrobatchSizes) -> Iterator[Call]:
    """Tokens of each expert, summed over the ranks that share a microbatch: for all its sequences, or for each."""
    job, size = plan.job, plan.layout.cp * plan.layout.tp
    if layer.ffn == "moe":
        counts_bytes = sizes.sum_bytes * plan.model.num_experts
        if job.aux_loss:
            yield from all_reduce("cp x tp", size, counts_bytes)
        if job.seq_aux_loss:
            yield from all_reduce("cp x tp", size, counts_bytes * job.micro_batch)


def embedding_and_loss_calls(plan: Plan, sizes: MicrobatchSizes) -> Iterator[Call]:
    """Embedding and loss, for the next token and once more for each MTP depth. A frozen embedding has no backward."""
    tp, is_trained = plan.layout.tp, "embedding" in saved_inputs(plan)
    shard_bytes = sizes.tokens * sizes.element_bytes * plan.model.dim
    for _ in range(1 + plan.mtp):
        scatter = scatter_both_ways if is_trained else reduce_scatter
        yield from scatter("tp", tp, shard_bytes)
        yield from gather_both_ways("tp", tp, shard_bytes)
        for tokens in _loss_chunks(plan, sizes):
            # The largest logit of a token; then the sum of exponentials, and the logit of its label.
            yield from all_reduce("tp", tp, sizes.sum_bytes * tokens)
            yield from all_reduce("tp", tp, sizes.sum_bytes * tokens * 2)


def _loss_chunks(plan: Plan, sizes: MicrobatchSizes) -> list[int]:
    """Tokens of each chunk of the loss, which works on all tokens of a tensor-parallel group."""
    tokens, vocab = sizes.tokens * plan.layout.tp, -(-plan.model.vocab // plan.layout.tp)
    most = max(_MIN_TOKENS, _LOGITS_BYTES.get(plan.cluster.chip, _GPU_LOGITS_BYTES) // (4 * vocab))
    num_chunks = max(1, -(-tokens // most))
    chunk = -(-tokens // (num_chunks * _TILE)) * _TILE or _TILE
    return [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
