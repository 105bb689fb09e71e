"""Calls of our own engine for context parallelism: one mixer and one microbatch on one rank, forward and backward.

`traffic/threefold/step.py` adds them up.
"""

from collections.abc import Iterator

from threefold.cost.traffic.threefold.calls import (
    Call,
    MicrobatchSizes,
    all_gather,
    all_to_all,
    gather_both_ways,
    reduce_scatter,
)
from threefold.plan.plan import Plan
from threefold.spec.model import DeltaSpec, GqaSpec, Layer, MambaSpec, MlaSpec


def context_parallel_calls(plan: Plan, layer: Layer, cp_comm: str, sizes: MicrobatchSizes) -> Iterator[Call]:
    """Calls of one mixer. Attention trades sequence for heads in one group, and reads keys and values of another."""
    if plan.layout.cp == 1 or layer.mixer == "none":
        return
    if layer.mixer == "delta" and plan.model.delta:
        yield from _delta_calls(plan, plan.model.delta, cp_comm, sizes)
        return
    if layer.mixer == "mamba" and plan.model.mamba:
        yield from _mamba_calls(plan, plan.model.mamba, cp_comm, sizes)
        return
    spec = plan.model.attention_of(layer)
    if spec is None:
        return
    cp = plan.layout.cp
    heads_group, heads_size, kv_group, kv_size = "cp", 1, "cp", cp
    if cp_comm == "a2a":
        heads_size, kv_size = cp, 1
    elif cp_comm == "a2a+p2p":
        heads_size = plan.cp_inner
        heads_group, kv_group, kv_size = "cp inner", "cp outer", cp // heads_size
    # Between modules tokens are sharded over tp; inside attention heads are.
    column = sizes.tokens * plan.layout.tp * sizes.element_bytes
    if plan.exchanges_latents and isinstance(spec, MlaSpec):
        sum_column = sizes.tokens * plan.layout.tp * sizes.sum_bytes
        groups = (heads_group, heads_size), (kv_group, kv_size)
        yield from _latent_calls(plan, spec, cp_comm, groups, (column, sum_column))
        return
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


def _latent_calls(
    plan: Plan,
    spec: MlaSpec,
    cp_comm: str,
    groups: tuple[tuple[str, int], tuple[str, int]],
    columns: tuple[int, int],
) -> Iterator[Call]:
    """MLA that exchanges latents. Inner ranks gather them in both passes and sum their gradients; the output is traded
    for the sequence, and with its gradient back in the backward. `columns` are bytes of a column and of a sum of it."""
    (inner_group, inner), (outer_group, outer) = groups
    column, sum_column = columns
    queries, latents = spec.q_rank or plan.model.dim, spec.kv_rank + spec.rope_dim
    out = spec.num_heads // plan.layout.tp * spec.v_dim
    yield from 2 * all_gather(inner_group, inner, column * queries)
    yield from reduce_scatter(inner_group, inner, sum_column * queries)
    yield from all_to_all(inner_group, inner, column * out)
    yield from all_to_all(inner_group, inner, column * 2 * out)
    if cp_comm == "all_gather":
        yield from 2 * all_gather(outer_group, outer, column * latents)
        yield from reduce_scatter(outer_group, outer, sum_column * latents)
        return
    yield from 2 * outer * all_gather(inner_group, inner, column * latents)
    yield from outer * reduce_scatter(inner_group, inner, sum_column * latents)
    yield from [(outer_group, "send", column * latents)] * (2 * (outer - 1))
    yield from [(outer_group, "send", sum_column * latents)] * (outer - 1)


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


def _mamba_calls(plan: Plan, spec: MambaSpec, cp_comm: str, sizes: MicrobatchSizes) -> Iterator[Call]:
    """Mamba-2 trades sequence for groups of heads; or ranks gather the ends of each rank's two spans, for the
    convolution, and what every span adds to a state, with the factor of each head for each of its columns."""
    tp, cp = plan.layout.tp, plan.layout.cp
    column = sizes.tokens * sizes.element_bytes
    if cp_comm == "a2a" and spec.num_groups // tp % cp == 0:
        for _ in ("forward", "backward"):
            yield from all_to_all("cp", cp, column * (spec.conv_dim + spec.num_heads))
            yield from all_to_all("cp", cp, column * spec.inner_dim)
        return
    num_spans = 2 * plan.job.micro_batch
    tail = min(spec.conv - 1, plan.job.seq_len // (2 * cp))
    yield from gather_both_ways("cp", cp, num_spans * tail * spec.conv_dim // tp * sizes.element_bytes)
    yield from gather_both_ways("cp", cp, num_spans * spec.inner_dim // tp * (spec.state_dim + 1) * sizes.sum_bytes)
