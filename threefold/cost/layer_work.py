"""The work of one rank for one layer and one microbatch: FLOPs, bytes and rows, before any rate is applied.

All quantities are those of the forward. `time/layer.py` turns them into seconds, `memory/megatron` and `traffic/` use
the sizes. `layer_work(layer_case(plan, layer))` is cached, because a plan has few kinds of layers and a search many
plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from threefold.plan.plan import Plan
from threefold.spec.flops import layer_flops
from threefold.spec.model import CompressedSpec, GqaSpec, Layer, MlaSpec, ModelSpec

BF16 = 2
# Scores of a query and head; passes over them stand for what attention with sinks lost in published 16-bit runs at 4K.
SINK_SCORES = 4096
ROUTED_BYTES = 24  # of a token and expert in the router's kernels: fp32 scores, top-k, routing maps
IMAGE_PATCHES = 4096  # patches of an image of about one megapixel, 16 x 16 pixels each


@dataclass(frozen=True, slots=True)
class LayerCase:
    """Everything that the work of a layer depends on, as a key of the cache."""

    model: ModelSpec
    layer: Layer
    seq_len: int  # tokens of a whole sequence
    tokens: int  # tokens of the microbatch on one context-parallel rank
    tp: int
    ep: int
    etp: int
    capacity: float  # rows at the experts over the balanced number
    sent: float = 1.0  # rows that travel over the balanced number


@dataclass(frozen=True, slots=True)
class Work:
    """Forward work of one layer on one rank."""

    dense_flops: float  # GEMMs outside the routed experts
    dense_rows: float  # rows of these GEMMs
    grouped_flops: float  # grouped GEMMs of the routed experts
    rows_per_expert: float
    weight_bytes: float  # weights of the routed experts, read once
    attention_flops: float  # the attention kernel
    sink_bytes: float  # what attention with sinks loses in 16 bits, in bytes of scores
    scan_bytes: float  # bytes that the recurrent kernels of linear mixers move
    moved_bytes: float  # bytes that elementwise and permutation kernels move
    latent_bytes: float  # the part of `moved_bytes` that MLA's heads take
    permuted_bytes: float  # the part of `moved_bytes` that permutes rows by expert and unpermutes them
    routed_bytes: float  # bytes of the router's scores, top-k and routing maps, by token and expert
    expert_moved_bytes: float  # bytes that the experts' elementwise kernels move; expert fusion saves most of them
    quant_elements: float  # elements quantized for dense GEMMs in low precision
    attention_elements: float  # elements that FP8 attention quantizes
    expert_quant_elements: float  # elements quantized for the experts' GEMMs
    dispatch_tokens: float  # tokens that the rank dispatches to its expert-parallel group
    sequence_bytes: float  # hidden states of the context-parallel rank, which tensor parallelism gathers and scatters


def layer_case(plan: Plan, layer: Layer, skew: float = 1.0) -> LayerCase:
    """The case of one layer. `skew` is the load of the busiest expert rank over the balanced load; with drop-and-pad
    the capacity factor takes its place."""
    layout, job = plan.layout, plan.job
    capacity = plan.expert_capacity_factor
    return LayerCase(
        model=plan.model,
        layer=layer,
        seq_len=job.seq_len,
        tokens=job.micro_batch * job.seq_len // layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.etp,
        capacity=skew if capacity is None else float(capacity),
        sent=plan.block_factor or 1.0,
    )


def expert_skew(loads: Sequence[float], ep: int) -> float:
    """The load of the heaviest expert rank over the mean, from the tokens of every expert."""
    total = sum(loads)
    if ep < 1 or len(loads) % ep or total <= 0 or min(loads) < 0:
        raise ValueError(f"{len(loads)} loads do not divide over {ep} ranks, or are no loads")
    local = len(loads) // ep
    return max(sum(loads[rank * local : (rank + 1) * local]) for rank in range(ep)) * ep / total


@lru_cache(maxsize=65536)
def layer_work(case: LayerCase) -> Work:
    """Forward work of one layer on one rank."""
    model, layer, t, tp = case.model, case.layer, case.tokens, case.tp
    flops = layer_flops(model, layer, case.seq_len)
    h, tokens = model.dim, t / tp  # tokens of the rank between tensor-parallel modules
    heads = _mixer_bytes(model, layer) * tokens
    moved = _norm_bytes(model, layer) * tokens + heads
    quant = _mixer_elements(model, layer) * tokens
    grouped = rows = weights = routed = permuted = expert_moved = expert_quant = 0.0
    per_expert = 0.0
    dense = flops.projections + flops.shared + (flops.ffn if layer.ffn == "dense" else 0.0)
    moe = model.moe
    num_fc1 = 2 if model.glu else 1  # gate and up, or up alone
    if layer.ffn == "dense":
        moved += BF16 * (num_fc1 + 1) * model.dense_dim * tokens
        quant += (h + model.dense_dim) * tokens
    elif layer.ffn == "moe" and moe:
        width = moe.latent_dim or h
        rows = tokens * moe.top_k * case.capacity
        grouped = flops.ffn * tokens * case.capacity
        per_expert = rows * case.ep / moe.num_experts * case.etp
        weights = BF16 * (num_fc1 + 1) * width * moe.expert_dim * moe.num_experts / case.ep / case.etp
        moved += tokens * BF16 * h  # the router's input
        routed = tokens * ROUTED_BYTES * moe.num_experts
        permuted = rows * BF16 * 3 * width + tokens * BF16 * width
        moved += permuted
        # A biased expert adds the bias to both outputs and sums the gradients of both: twice as many passes.
        expert_moved = rows * BF16 * (num_fc1 + 1) * moe.expert_dim * (2 if moe.bias else 1)
        moved += rows * BF16 * width if moe.bias else 0.0
        expert_quant = rows * (width + moe.expert_dim)
        moved += BF16 * (num_fc1 + 1) * moe.shared_width * tokens
        quant += (h + moe.shared_width) * tokens if moe.shared_width else 0.0
    return Work(
        dense_flops=dense * tokens,
        dense_rows=t,
        grouped_flops=grouped,
        rows_per_expert=per_expert,
        weight_bytes=weights,
        attention_flops=0.0 if layer.mixer in ("delta", "mamba") else flops.attention * tokens,
        sink_bytes=_sink_bytes(model, layer, case.seq_len) * tokens,
        scan_bytes=_scan_bytes(model, layer) * tokens,
        moved_bytes=moved,
        latent_bytes=heads if isinstance(model.attention, MlaSpec) else 0.0,
        permuted_bytes=permuted,
        routed_bytes=routed,
        expert_moved_bytes=expert_moved,
        quant_elements=quant,
        attention_elements=_attention_elements(model, layer) * tokens,
        expert_quant_elements=expert_quant,
        dispatch_tokens=tokens * case.sent if layer.ffn == "moe" else 0.0,
        sequence_bytes=BF16 * h * t,
    )


def _norm_bytes(model: ModelSpec, layer: Layer) -> float:
    """Bytes per token of norm and residual connection around the mixer and the feed-forward part: read, write, add."""
    parts = (layer.mixer != "none") + (layer.ffn != "none")
    streams = 6 * model.stream_dim if model.streams else 0  # for weights, to read and to write; each there and back
    return parts * BF16 * (model.dim * 5 + streams)


def _mixer_bytes(model: ModelSpec, layer: Layer) -> float:
    """Bytes per token of rotary embedding and head norms, each of which reads and writes queries and keys."""
    spec = model.attention_of(layer)
    if spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return BF16 * 2 * (2 * spec.num_heads * spec.qk_dim + spec.num_heads * spec.v_dim)
    passes = 2 if spec.qk_norm else 1
    return BF16 * 2 * passes * (spec.q_dim + spec.kv_dim)


def _mixer_elements(model: ModelSpec, layer: Layer) -> float:
    """Elements per token that enter the mixer's GEMMs and are quantized for them."""
    h, spec = model.dim, model.attention_of(layer)
    if layer.mixer == "mamba" and model.mamba:
        return h + model.mamba.inner_dim
    if layer.mixer == "delta" and model.delta:
        return h + model.delta.values
    if spec is None:
        return 0.0
    if isinstance(spec, CompressedSpec):
        return h + spec.q_rank + spec.out_groups * spec.out_rank
    if isinstance(spec, MlaSpec):
        return h + (spec.q_rank or 0) + spec.kv_rank + spec.num_heads * spec.v_dim
    assert isinstance(spec, GqaSpec)
    return h + spec.q_dim


def _attention_elements(model: ModelSpec, layer: Layer) -> float:
    """Elements per token that FP8 attention quantizes, as a third of a step's: queries, keys and values in the forward,
    gradients of the output in the backward."""
    spec = model.attention_of(layer)
    if spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return 2 * spec.num_heads * (spec.qk_dim + spec.v_dim) / 3
    return 2 * (spec.q_dim + spec.kv_dim) / 3


def _sink_bytes(model: ModelSpec, layer: Layer, seq_len: int) -> float:
    """Bytes per token that stand for the loss of attention with sinks.

    No stack writes scores out at length, where they would not fit, so the loss grows with the tokens and not with their
    square.
    """
    spec = model.attention_of(layer)
    if not isinstance(spec, GqaSpec) or not spec.sinks:
        return 0.0
    return BF16 * spec.num_heads * min(seq_len, SINK_SCORES)


def _scan_bytes(model: ModelSpec, layer: Layer) -> float:
    """Bytes per token of inputs, gates, states and outputs of a linear mixer, each read and written once."""
    if layer.mixer == "delta" and model.delta:
        return BF16 * 4 * (2 * model.delta.keys + 2 * model.delta.values)
    if layer.mixer == "mamba" and model.mamba:
        spec = model.mamba
        return BF16 * 4 * (2 * spec.inner_dim + 2 * spec.num_groups * spec.state_dim)
    return 0.0
