"""Calls of our own engine for tensor parallelism: layers, embedding and loss; and the reductions of balancing losses.

All functions return the calls of one rank for one microbatch, forward and backward. `step.py` multiplies them.
"""

from collections.abc import Iterator

from threefold.cost.traffic.threefold.calls import (
    Call,
    MicrobatchSizes,
    all_gather,
    all_reduce,
    gather_both_ways,
    reduce_scatter,
    scatter_both_ways,
)
from threefold.cost.trained_weights import saved_inputs
from threefold.plan.plan import Plan
from threefold.spec.model import CompressedSpec, GqaSpec, Layer, MlaSpec

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
