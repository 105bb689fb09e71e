"""Calls of our own engine for context parallelism: one mixer and one microbatch on one rank, forward and backward.

`traffic/threefold/step.py` adds them up.
"""

from collections.abc import Iterator
from math import gcd

from threefold.cost.traffic.threefold.calls import (
    Call,
    MicrobatchSizes,
    all_gather,
    all_to_all,
    gather_both_ways,
    reduce_scatter,
)
from threefold.plan.plan import Plan
from threefold.spec.model import DeltaSpec, GqaSpec, Layer, MlaSpec


def context_parallel_calls(plan: Plan, layer: Layer, cp_comm: str, sizes: MicrobatchSizes) -> Iterator[Call]:
    """Calls of one mixer. Attention trades sequence for heads in one group, and reads keys and values of another."""
    if plan.layout.cp == 1:
        return
    if layer.mixer == "delta" and plan.model.delta:
        yield from _delta_calls(plan, plan.model.delta, cp_comm, sizes)
        return
    spec = plan.model.local_attention if layer.mixer == "window" else plan.model.attention
    if spec is None:
        return
    cp = plan.layout.cp
    heads_group, heads_size, kv_group, kv_size = "cp", 1, "cp", cp
    if cp_comm == "a2a":
        heads_size, kv_size = cp, 1
    elif cp_comm == "a2a+p2p":
        heads_size = _num_inner_ranks(plan)
        heads_group, kv_group, kv_size = "cp inner", "cp outer", cp // heads_size
    # Between modules tokens are sharded over tp; inside attention heads are.
    column = sizes.tokens * plan.layout.tp * sizes.element_bytes
    queries, keys, values, out = _attention_columns(spec, plan.layout.tp)
    for _ in ("forward", "backward"):
        yield from all_to_all(heads_group, heads_size, column * (queries + keys + values))
        yield from all_to_all(heads_group, heads_size, column * out)
    if cp_comm == "all_gather":
        for shard_bytes in (column * keys, column * values):
            yield from 2 * all_gather(kv_group, kv_size, shard_bytes)  # the backward gathers them once more
            yield from reduce_scatter(kv_group, kv_size, shard_bytes)
    else:
        # Keys and values in the forward, the same in the backward, and their gradients: each goes round once.
        yield from [(kv_group, "send", column * (keys + values))] * (3 * (kv_size - 1))


def _num_inner_ranks(plan: Plan) -> int:
    """Ranks of one fast domain that trade heads; 1 where a domain holds the whole context-parallel group."""
    link = plan.link("cp")
    return gcd(plan.layout.cp, link.in_domain) if link.link == "network" else 1


def _attention_columns(spec: GqaSpec | MlaSpec, tp: int) -> tuple[int, int, int, int]:
    """Columns of queries, keys, values and output on a rank. With more ranks than key/value heads, ranks hold
    copies."""
    heads = spec.num_heads // tp
    if isinstance(spec, MlaSpec):
        return heads * spec.qk_dim, heads * spec.qk_dim, heads * spec.v_dim, heads * spec.v_dim
    keys = max(1, spec.num_kv_heads // tp) * spec.head_dim
    return heads * spec.head_dim, keys, keys, heads * spec.head_dim


def _delta_calls(plan: Plan, spec: DeltaSpec, cp_comm: str, sizes: MicrobatchSizes) -> Iterator[Call]:
    """The gated delta rule trades sequence for heads; or ranks gather the ends of each rank's two spans, for the
    convolution, and what every span does to a state."""
    tp, cp = plan.layout.tp, plan.layout.cp
    column = sizes.tokens * sizes.element_bytes  # of all heads: tp shards heads as it shards tokens elsewhere
    if cp_comm == "a2a" and spec.num_k_heads // tp % cp == 0:
        for _ in ("forward", "backward"):
            yield from all_to_all("cp", cp, column * (2 * spec.keys + spec.values + 2 * spec.num_v_heads))
            yield from all_to_all("cp", cp, column * spec.values)
        return
    num_spans = 2 * plan.job.micro_batch
    tail = min(spec.conv - 1, plan.job.seq_len // (2 * cp))
    channels = (2 * spec.keys + spec.values) // tp
    yield from gather_both_ways("cp", cp, num_spans * tail * channels * sizes.element_bytes)
    state = spec.num_v_heads // tp * spec.k_dim * (spec.v_dim + spec.k_dim)
    yield from gather_both_ways("cp", cp, num_spans * state * sizes.sum_bytes)
