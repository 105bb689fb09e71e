"""The backward of attention over context-parallel ranks in our own engine, tensor by tensor.

It follows `engine/shard/ring_attention.py`, `context_parallel.py` and `latent_attention.py`, and the tiles of
`engine/attention/attend_tiles.py`. Bytes are above what attention saves, with the gradient of the residual stream left
out. `transients.py` asks for the most bytes of a layer.

A tile has the queries of one of the two spans of a rank. The kernels want values as wide as keys: MLA's are padded.

Mirrors `engine/shard/ring_attention.py`, `engine/shard/context_parallel.py`, `engine/shard/latent_attention.py`,
`engine/attention/attend_tiles.py`, `engine/attention/mask_tiles.py`, `engine/attention/query_blocks.py`,
`engine/attention/fused_delta.py`, `engine/attention/delta_chunks.py`.
"""

import math
from dataclasses import dataclass

from threefold.cost.delta_rule import DELTA_CHUNK, passes_delta_states, uses_fla
from threefold.cost.memory.threefold.local_sizes import CHUNK_LIMIT_BYTES, FP32, LocalSizes
from threefold.cost.memory.threefold.timelines.recurrent_mixers import fla_backward_peak
from threefold.cost.memory.threefold.timelines.timeline import Timeline
from threefold.spec.model import CompressedSpec, DeltaSpec, GqaSpec, MlaSpec

QUERY_BLOCK_BYTES = 2**28  # fp32 scores of one block of queries, in plain torch
MOST_QUERIES = 1024  # of a block of compressed attention
MAX_BLOCK_BYTES = 2**30  # fp32 gradients of the keys and values of one block of an all-gather


@dataclass(frozen=True)
class HeadSizes:
    """Elements of queries, keys, values and outputs for the tokens of one rank."""

    local: LocalSizes
    spec: GqaSpec | MlaSpec

    @property
    def tokens(self) -> float:
        return self.local.gathered_tokens

    @property
    def num_heads(self) -> float:
        return self.spec.num_heads / self.local.tp

    @property
    def num_kv_heads(self) -> float:
        return max(1.0, self.spec.num_kv_heads / self.local.tp)

    @property
    def qk_dim(self) -> int:
        return self.spec.qk_dim if isinstance(self.spec, MlaSpec) else self.spec.head_dim

    @property
    def v_dim(self) -> int:
        return self.spec.v_dim if isinstance(self.spec, MlaSpec) else self.spec.head_dim

    @property
    def queries(self) -> float:
        return self.num_heads * self.qk_dim * self.tokens

    @property
    def keys(self) -> float:
        return self.num_kv_heads * self.qk_dim * self.tokens

    @property
    def values(self) -> float:
        return self.num_kv_heads * self.v_dim * self.tokens

    @property
    def out(self) -> float:
        return self.num_heads * self.v_dim * self.tokens

    @property
    def is_grouped(self) -> bool:
        return self.spec.num_kv_heads != self.spec.num_heads


def cp_attention_peak(local: LocalSizes, spec: GqaSpec | MlaSpec) -> float:
    """The most bytes in the backward of attention over context-parallel ranks that exchange queries, keys or values."""
    sizes, line, b = HeadSizes(local, spec), Timeline(), local.element_bytes
    # The output's gradient. The copy of the output that the output projection had saved is freed.
    line.replace(b * sizes.out, b * sizes.out)
    inner, outer = ring_sizes(local)
    if inner > 1:  # the output's gradient by heads: as it is sent, received and put in order
        line.make(2 * b * sizes.out)
        line.free(2 * b * sizes.out)
    if local.cp_comm == "all_gather":
        _all_gather(line, sizes)
    elif outer > 1:
        _ring(line, sizes, outer)
    else:
        _whole_sequence(line, sizes)
    grads = b * (sizes.queries + sizes.keys + sizes.values)
    if inner > 1:
        line.free(b * sizes.out)
        line.make(2 * grads)
    return line.peak


def ring_sizes(local: LocalSizes) -> tuple[int, int]:
    """Ranks that trade heads, and ranks between which keys and values travel."""
    return local.cp_inner, local.plan.layout.cp // local.cp_inner


def _tile(line: Timeline, sizes: HeadSizes, num_keys: float, fraction: float = 0.5, num_tiles: int = 2) -> None:
    """The backward of tiles with a fraction of the queries and so many tokens of keys, one after the other: gradients
    of the tile before are there until the kernel has returned."""
    b, queries = sizes.local.element_bytes, sizes.queries * fraction
    keys = sizes.num_kv_heads * sizes.qk_dim * num_keys
    if sizes.local.attends_in_blocks(sizes.spec):
        inner, _ = ring_sizes(sizes.local)
        grads = b * queries + FP32 * sizes.num_kv_heads * (sizes.qk_dim + sizes.v_dim) * num_keys
        line.make((num_tiles - 1) * grads, b * queries)
        _query_blocks(line, sizes, sizes.num_heads / inner, sizes.tokens * fraction * inner, num_keys * inner)
        line.free(num_tiles * grads)
        return
    grads = b * (queries + 2 * keys)
    padded = b * (2 * queries + keys) if sizes.v_dim < sizes.qk_dim else 0.0
    in_fp32 = FP32 * (queries + sizes.num_heads * sizes.tokens * fraction)
    by_query_head = 2 * b * queries if sizes.is_grouped else 0.0
    line.pass_through(num_tiles * grads, padded, in_fp32, by_query_head)


def _ring(line: Timeline, sizes: HeadSizes, num_ranks: int) -> None:
    """Keys and values go round; their gradients follow one step behind. The second step has most: this rank's own
    gradients, those of the step, what has arrived and what is arriving."""
    b = sizes.local.element_bytes
    keys_and_values = sizes.keys + sizes.values
    line.make(FP32 * sizes.queries)
    line.make(FP32 * 2 * keys_and_values)
    line.make(b * keys_and_values * min(3, num_ranks - 1))
    _tile(line, sizes, sizes.tokens / 2)
    line.free(FP32 * 2 * keys_and_values, b * keys_and_values * min(3, num_ranks - 1))
    line.make(FP32 * keys_and_values)
    _cast_grads(line, sizes)
    line.free(FP32 * (sizes.queries + keys_and_values))


def _all_gather(line: Timeline, sizes: HeadSizes) -> None:
    """All keys and values, their gradients, and sums in fp32 for one block of keys at a time."""
    b, cp = sizes.local.element_bytes, sizes.local.plan.layout.cp
    whole = b * cp * (sizes.keys + sizes.values)
    line.make(2 * whole)  # as they arrive, and in order
    line.free(whole)
    line.make(FP32 * sizes.queries, whole)
    token_bytes = FP32 * sizes.num_kv_heads * (sizes.qk_dim + sizes.v_dim)
    half, window = sizes.tokens / 2, sizes.spec.window if isinstance(sizes.spec, GqaSpec) else None
    # Both spans of queries have a tile with this rank's first span of keys; one of them with a block between them.
    for most, num_tiles in ((half, 2), (min(MAX_BLOCK_BYTES / token_bytes, 2 * half * (cp - 1)), 1)):
        line.make(token_bytes * most)
        _tile(line, sizes, min(most, window or most), num_tiles=num_tiles)
        line.free(token_bytes * most)
    line.pass_through(b * (cp + 1) * sizes.keys)
    line.free(whole)
    _cast_grads(line, sizes)
    line.free(FP32 * sizes.queries, whole)


def _cast_grads(line: Timeline, sizes: HeadSizes) -> None:
    """Gradients in the dtype of what they are of, then those of sinks: products of output and gradient in fp32."""
    line.make(sizes.local.element_bytes * (sizes.queries + sizes.keys + sizes.values))
    if isinstance(sizes.spec, GqaSpec) and sizes.spec.sinks:
        line.pass_through(3 * FP32 * sizes.out)


def _whole_sequence(line: Timeline, sizes: HeadSizes) -> None:
    """One kernel for this rank's heads of the whole sequence."""
    b = sizes.local.element_bytes
    in_fp32 = FP32 * (sizes.queries + sizes.num_heads * sizes.tokens)
    by_query_head = 2 * b * sizes.queries if sizes.is_grouped else 0.0
    grads = b * (sizes.queries + sizes.keys + sizes.values)
    line.make(grads)
    sinks = isinstance(sizes.spec, GqaSpec) and sizes.spec.sinks
    num_kv_heads = sizes.num_kv_heads / ring_sizes(sizes.local)[0]
    groups = min(max(1.0, num_kv_heads), math.ceil(FP32 * sizes.queries / CHUNK_LIMIT_BYTES))
    if groups > 1 and not sinks:  # groups of heads run one by one, but the first is laid out for all heads
        line.pass_through(FP32 * sizes.queries, (in_fp32 - FP32 * sizes.queries + by_query_head + grads) / groups)
    line.pass_through(max((in_fp32 + by_query_head) * (groups == 1), 3 * FP32 * sizes.out if sinks else 0.0))


def latent_attention_peak(local: LocalSizes, spec: MlaSpec) -> float:
    """The same where ranks exchange latents, which each expands for its own heads, one span of tokens at a time."""
    sizes, line, b = HeadSizes(local, spec), Timeline(), local.element_bytes
    inner, outer = ring_sizes(local)
    line.make(b * sizes.out)
    if inner > 1:  # output and its gradient by heads
        line.make(4 * b * sizes.out)
        line.free(2 * b * sizes.out)
    inner_tokens, q_width = inner * sizes.tokens, spec.q_rank or local.model.dim
    latent, gathers = spec.kv_rank + spec.rope_dim, local.cp_comm == "all_gather"
    if inner > 1:
        line.make(2 * b * q_width * inner_tokens)
        line.free(b * q_width * inner_tokens)
    line.make(2 * b * sizes.queries)
    line.free(b * sizes.queries)
    line.make(FP32 * sizes.queries)
    line.make(b * latent * sizes.tokens * (outer if gathers else min(2, outer - 1)))
    line.make(b * latent * inner_tokens if inner > 1 else 0.0)
    # Gradients of latents: of the rank that is computed, then of all ranks beside it, or of two in a ring.
    line.make(FP32 * latent * (sizes.tokens if gathers else min(2, outer) * inner_tokens))
    _latent_span(line, sizes, spec, 0.5 if outer > 1 else 1.0, 2 if outer > 1 else 1)
    if gathers:
        line.make(FP32 * latent * sizes.tokens * outer)
        _latent_span(line, sizes, spec, 0.5, 1)
    line.free(0.0 if gathers or outer == 1 else FP32 * latent * inner_tokens)
    # Gradients of the queries' latents, in fp32 and in the order in which ranks hold them.
    line.make(b * sizes.queries)
    line.replace(b * q_width * inner_tokens, b * sizes.queries)
    line.replace(FP32 * q_width * inner_tokens, b * q_width * inner_tokens)
    line.make(FP32 * q_width * (inner_tokens + sizes.tokens) if inner > 1 else 0.0)
    return line.peak


def _latent_span(line: Timeline, sizes: HeadSizes, spec: MlaSpec, fraction: float, num_tiles: int) -> None:
    """Keys and values of one span of latents, in fp32 their gradients; those as the up projection reads them; its own
    output's. The first rank has both its spans of queries in tiles with its own first span of keys only."""
    b = sizes.local.element_bytes
    up = b * sizes.num_heads * (spec.nope_dim + spec.v_dim) * sizes.tokens * fraction
    keys_and_values = (sizes.keys + sizes.values) * fraction
    line.make(up, b * sizes.keys * fraction)
    line.make(FP32 * keys_and_values)
    _tile(line, sizes, sizes.tokens * fraction, fraction, num_tiles)
    line.make(b * keys_and_values)
    line.free(FP32 * keys_and_values)
    line.make(up)
    line.free(2 * up, b * sizes.keys * fraction, b * keys_and_values)


def delta_backward_peak(local: LocalSizes, spec: DeltaSpec) -> float:
    """The most bytes in the backward of the gated delta rule, with the gradient of the residual stream: gradients of
    its chunks in fp32, and then those of the states that ranks exchange."""
    b, tokens, heads, k, v = local.element_bytes, local.gathered_tokens, spec.num_v_heads, spec.k_dim, spec.v_dim
    per_dim, residual = FP32 * heads / local.tp * tokens, b * local.model.dim * local.tokens
    if uses_fla(local.plan, local.cp_comm):
        return fla_backward_peak(local, spec) + residual
    # Those of one more tensor are summed.
    chunk_grads = per_dim * (3 * k + v + DELTA_CHUNK + max(k, v))
    # A recompute of the rule ends with its projected and convolved channels, heads, outputs by chunk and all of them.
    # Spans of ranks are activated one by one.
    again, passes_states = 0.0, passes_delta_states(local.plan, local.cp_comm)
    if "core_attn" in local.recompute:
        widths = (1 if passes_states else 2) * (2 * spec.keys + spec.values) + 2 * heads * (k + v)
        again = b * widths / local.tp * tokens + 2 * per_dim * v + residual
    if not passes_states:
        return max(chunk_grads + residual, again)
    num_spans = 2 * local.plan.layout.cp * local.plan.job.micro_batch
    states = FP32 * heads / local.tp * k * (k + v) * num_spans
    in_chunks = chunk_grads / 2 + states  # one of both spans at a time
    # When the gradients of both spans' states are summed, all that follows the states in the forward is freed.
    after_states = per_dim * (k * v / DELTA_CHUNK + k + 2 * v) + 2 * b / FP32 * per_dim * v
    return max(max(in_chunks, 3 * states + per_dim * (3 * k + v) - after_states) + residual, again)


def query_blocks_peak(local: LocalSizes, spec: GqaSpec | MlaSpec, fraction: float = 1.0) -> float:
    """The most bytes in the backward of attention in blocks of queries, for a fraction of the heads, with the gradients
    of the output and of the residual stream."""
    sizes, line, b = HeadSizes(local, spec), Timeline(), local.element_bytes
    line.make(b * sizes.out, b * sizes.queries * fraction)
    inner, _ = ring_sizes(local)
    num_keys = sizes.tokens * inner
    if isinstance(spec, CompressedSpec) and spec.rate:
        num_keys += sizes.tokens // spec.rate
    _query_blocks(line, sizes, sizes.num_heads / inner * fraction, sizes.tokens * inner, num_keys, _read_keys(sizes))
    if local.is_16_bit:
        line.make(b * (sizes.keys + sizes.values) * fraction)
    if isinstance(spec, GqaSpec) and spec.sinks:
        line.pass_through(3 * FP32 * sizes.out * fraction)
    return line.peak + local.residual_bytes


def _read_keys(sizes: HeadSizes) -> float | None:
    """Keys that a block of compressed attention reads, its entries and the tokens since its window; None: all."""
    spec = sizes.spec
    if not isinstance(spec, CompressedSpec) or spec.window is None:
        return None
    entries = sizes.tokens // spec.rate if spec.rate else 0.0
    return min(sizes.tokens + entries, entries + spec.window + MOST_QUERIES)


def _query_blocks(
    line: Timeline,
    sizes: HeadSizes,
    num_heads: float,
    num_queries: float,
    num_keys: float,
    read_keys: float | None = None,
) -> None:
    """Gradients of keys and values in fp32, which stay. For one block of queries: its scores and their gradients, what
    it reads and writes, and one after the other the keys, the values, and its part of their gradients in fp32."""
    kv_heads, num_rows = num_heads * sizes.num_kv_heads / sizes.num_heads, sizes.local.plan.job.micro_batch
    keys, values = (FP32 * kv_heads * dim * num_keys for dim in (sizes.qk_dim, sizes.v_dim))
    read = 1.0 if read_keys is None else read_keys / num_keys
    score_bytes = FP32 * num_heads * num_keys * read  # of one query of each row
    block = min(num_queries / num_rows, max(1, QUERY_BLOCK_BYTES // score_bytes))
    block = block if read_keys is None else min(block, MOST_QUERIES)
    queries, outputs = (FP32 * num_heads * dim * block * num_rows for dim in (sizes.qk_dim, sizes.v_dim))
    scores, casts = score_bytes * block, sizes.local.is_16_bit
    line.make(keys + values)
    line.pass_through(scores, queries * casts, read * keys * casts)
    line.pass_through(scores, outputs * casts, read * values)
    line.pass_through(2 * scores, outputs * casts, max(read * values * casts, queries + read * keys))
