"""Attention in recomputed layers of our own engine: outputs that are saved, and heads that run in groups.

It follows `engine/autograd/saved_tensors.py` and `engine/attention/head_groups/`. Sizes are bytes of one rank for one
microbatch, or bytes a token where the name says so.

Mirrors `engine/autograd/saved_tensors.py`, `engine/attention/head_groups/gqa_head_groups.py`,
`engine/attention/head_groups/cudnn_head_groups.py`.
"""

from dataclasses import dataclass

from threefold.cost.memory.threefold.local_sizes import CHUNK_LIMIT_BYTES, FP32, LocalSizes, is_sparse
from threefold.spec.model import GqaSpec, Layer, MlaSpec


def attention_of(local: LocalSizes, layer: Layer) -> GqaSpec | MlaSpec | None:
    """The softmax attention of a layer, if it has one."""
    return local.model.attention_of(layer)


def saved_output_bytes(local: LocalSizes, layer: Layer) -> float:
    """Outputs and log-sum-exps of attention that a fully recomputed layer saves all the same."""
    spec = attention_of(local, layer)
    if "core_attn" not in local.plan.knobs.recompute_save or "full" not in local.recompute or spec is None:
        return 0.0
    value_dim = spec.head_dim if isinstance(spec, GqaSpec) else spec.v_dim
    if isinstance(spec, MlaSpec) and not (local.has_fused_kernels or is_sparse(spec)) and local.plan.layout.cp == 1:
        value_dim = spec.qk_dim  # a CPU's kernel has values padded to the width of keys
    return spec.num_heads / local.tp * (local.element_bytes * value_dim + FP32) * local.gathered_tokens


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Heads that attention works on at a time."""

    heads: int
    kv_heads: int
    is_all: bool  # whether these are all heads of the rank


def gqa_group(local: LocalSizes, spec: GqaSpec) -> HeadGroup:
    """The heads of a group in a layer that is fully recomputed; all of them where ranks communicate inside attention,
    where a norm is over all heads, in low precision and with adapters."""
    heads, kv_heads = max(1, int(spec.num_heads / local.tp)), max(1, int(spec.num_kv_heads / local.tp))
    adapts = local.has_adapters and "attention" in local.plan.job.lora_targets
    is_whole = "full" not in local.recompute or adapts or bool(local.plan.low_precision)
    is_whole = is_whole or local.plan.layout.cp * local.tp > 1 or (spec.qk_norm and spec.qk_norm_over == "projection")
    if is_whole:
        return HeadGroup(heads, kv_heads, is_all=True)
    size = query_heads_per_group(heads, kv_heads, local.element_bytes * spec.head_dim * local.gathered_tokens)
    return HeadGroup(size, max(1, size * kv_heads // heads), size == heads)


def query_heads_per_group(num_heads: int, num_kv: int, head_bytes: float) -> int:
    """Query heads of a group: whole key/value heads with all their queries, or an equal part of the queries of one."""
    queries_per_kv, fitting = max(1, num_heads // num_kv), max(1, int(CHUNK_LIMIT_BYTES // max(1.0, head_bytes)))
    if fitting >= queries_per_kv:
        num_groups = -(-num_kv // (fitting // queries_per_kv))
        return -(-num_kv // num_groups) * queries_per_kv
    return next(size for size in range(fitting, 0, -1) if queries_per_kv % size == 0)


def kernel_workspace(local: LocalSizes, spec: GqaSpec, heads: int, kv_heads: int) -> float:
    """Bytes a token that the backward of so many heads takes besides their gradients. The kernel runs for some heads at
    a time."""
    b, head = local.element_bytes, spec.head_dim
    size = query_heads_per_group(heads, kv_heads, FP32 * head * local.gathered_tokens)
    # In grouped attention every query head first makes gradients of its own for keys and values.
    summed = FP32 * size * (head + 1) + (2 * b * head * size if spec.num_kv_heads != spec.num_heads else 0)
    if size == heads:
        # Gradients of sinks: that of the output, the output and the product of both, all in fp32.
        return max(summed, 3 * FP32 * head * heads) if spec.sinks else summed
    return summed + b * head * (size + 2 * max(1, size * kv_heads // heads))


def grouped_backward_bytes(local: LocalSizes, spec: GqaSpec, group: HeadGroup) -> float:
    """The backward of one group, less what it projects once more: gradients of its output, queries, keys and values,
    and the kernel's workspace. Beside it lie the gradients of attention's output and, from the second group on, of its
    input."""
    per_token = float(local.element_bytes * spec.head_dim * (2 * group.heads + 2 * group.kv_heads))
    per_token += kernel_workspace(local, spec, group.heads, group.kv_heads)
    return (per_token + 2 * local.element_bytes * local.model.dim) * local.gathered_tokens
