"""What one rank does for one layer and one microbatch: FLOPs, bytes and rows, before any rate is applied.

Forward quantities; `t` counts tokens of the microbatch on a context-parallel rank, `r` rows at the experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from threefold.plan.plan import Plan
from threefold.spec.flops import layer_flops
from threefold.spec.model import GqaSpec, Layer, MlaSpec, ModelSpec

BF16 = 2
IMAGE_PATCHES = 4096  # of an image of about one megapixel, 16 x 16 pixels each


@dataclass(frozen=True, slots=True)
class Case:
    """Everything the work of a layer depends on."""

    model: ModelSpec
    layer: Layer
    seq_len: int
    tokens: int  # of the microbatch on one context-parallel rank
    tp: int
    ep: int
    etp: int
    capacity: float  # rows at the experts over the balanced number


@dataclass(frozen=True, slots=True)
class Work:
    """Forward work of one layer on one rank."""

    dense_flops: float
    dense_rows: float
    grouped_flops: float
    rows_per_expert: float
    weight_bytes: float  # expert weights read once
    attention_flops: float
    score_bytes: float  # attention scores, where a kernel writes them out
    scan_bytes: float  # linear mixers: bytes of their recurrent kernels
    moved_bytes: float  # elementwise and permutation passes
    permuted_bytes: float  # of these, what orders rows by expert and sums them up again
    expert_moved_bytes: float  # of experts, beside these: what an expert fusion saves
    quant_elements: float
    expert_quant_elements: float
    dispatch_tokens: float  # tokens a rank sends to its expert group
    sequence_bytes: float  # hidden states of the rank's share, as tensor parallel moves them


def case_of(plan: Plan, layer: Layer, skew: float = 1.0) -> Case:
    """`skew` is the load of the busiest expert rank over the balanced one; drop-and-pad fixes it at its capacity."""
    layout, job = plan.layout, plan.job
    padded = job.capacity_factor is not None and job.capacity_scope == "expert"
    return Case(
        model=plan.model,
        layer=layer,
        seq_len=job.seq_len,
        tokens=job.micro_batch * job.seq_len // layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.etp,
        capacity=float(job.capacity_factor or 1.0) if padded else skew,
    )


def busiest(loads: Sequence[float], ep: int) -> float:
    """The skew of a distribution of tokens over experts: the heaviest expert rank over the mean."""
    total = sum(loads)
    if ep < 1 or len(loads) % ep or total <= 0 or min(loads) < 0:
        raise ValueError(f"{len(loads)} loads do not divide over {ep} ranks, or are no loads")
    local = len(loads) // ep
    return max(sum(loads[rank * local : (rank + 1) * local]) for rank in range(ep)) * ep / total


@lru_cache(maxsize=65536)
def layer_work(case: Case) -> Work:
    model, layer, t, tp = case.model, case.layer, case.tokens, case.tp
    flops = layer_flops(model, layer, case.seq_len)
    h, share = model.dim, t / tp
    moved = _norm_bytes(model, layer) * share + _mixer_bytes(model, layer) * share
    quant = _mixer_elements(model, layer) * share
    grouped = rows = weights = permuted = expert_moved = expert_quant = 0.0
    per_expert = 0.0
    dense = flops.projections + flops.shared + (flops.ffn if layer.ffn == "dense" else 0.0)
    moe = model.moe
    wide = 2 if model.glu else 1
    if layer.ffn == "dense":
        moved += BF16 * (wide + 1) * model.dense_dim * share
        quant += (h + model.dense_dim) * share
    elif layer.ffn == "moe" and moe:
        width = moe.latent_dim or h
        rows = share * moe.top_k * case.capacity
        grouped = flops.ffn * share * case.capacity
        per_expert = rows * case.ep / moe.num_experts * case.etp
        weights = BF16 * (wide + 1) * width * moe.expert_dim * moe.num_experts / case.ep / case.etp
        moved += share * (BF16 * h + 24 * moe.num_experts)  # router: fp32 scores, top-k, maps
        permuted = rows * BF16 * 3 * width + share * BF16 * width
        moved += permuted
        # A biased expert adds the bias to both outputs and sums their gradients: as many passes again.
        expert_moved = rows * BF16 * (wide + 1) * moe.expert_dim * (2 if moe.bias else 1)
        moved += rows * BF16 * width if moe.bias else 0.0
        expert_quant = rows * (width + moe.expert_dim)
        moved += BF16 * (wide + 1) * moe.shared_width * share
        quant += (h + moe.shared_width) * share if moe.shared_width else 0.0
    return Work(
        dense_flops=dense * share,
        dense_rows=t,
        grouped_flops=grouped,
        rows_per_expert=per_expert,
        weight_bytes=weights,
        attention_flops=0.0 if layer.mixer in ("delta", "mamba") else flops.attention * share,
        score_bytes=_score_bytes(model, layer, case.seq_len) * share,
        scan_bytes=_scan_bytes(model, layer) * share,
        moved_bytes=moved,
        permuted_bytes=permuted,
        expert_moved_bytes=expert_moved,
        quant_elements=quant,
        expert_quant_elements=expert_quant,
        dispatch_tokens=share if layer.ffn == "moe" else 0.0,
        sequence_bytes=BF16 * h * t,
    )


def _norm_bytes(model: ModelSpec, layer: Layer) -> float:
    """Norm and residual of each part: read, write, add."""
    parts = (layer.mixer != "none") + (layer.ffn != "none")
    return parts * BF16 * model.dim * 5


def _mixer_bytes(model: ModelSpec, layer: Layer) -> float:
    """Rotary embedding and head norms: each reads and writes queries and keys."""
    spec = model.attention if layer.mixer == "attention" else model.local_attention
    if layer.mixer not in ("attention", "window") or spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return BF16 * 2 * (2 * spec.num_heads * spec.qk_dim + spec.num_heads * spec.v_dim)
    passes = 2 if spec.qk_norm else 1
    return BF16 * 2 * passes * (spec.q_dim + spec.kv_dim)


def _mixer_elements(model: ModelSpec, layer: Layer) -> float:
    """Elements that enter the mixer's GEMMs and are quantised first."""
    h, spec = model.dim, model.attention
    if layer.mixer == "mamba" and model.mamba:
        return h + model.mamba.inner_dim
    if layer.mixer == "delta" and model.delta:
        return h + model.delta.values
    if layer.mixer == "none" or spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return h + (spec.q_rank or 0) + spec.kv_rank + spec.num_heads * spec.v_dim
    assert isinstance(spec, GqaSpec)
    return h + spec.q_dim


def _score_bytes(model: ModelSpec, layer: Layer, seq_len: int) -> float:
    spec = model.attention if layer.mixer == "attention" else model.local_attention
    if layer.mixer not in ("attention", "window") or not isinstance(spec, GqaSpec) or not spec.sinks:
        return 0.0
    return BF16 * spec.num_heads * seq_len


def _scan_bytes(model: ModelSpec, layer: Layer) -> float:
    """Inputs, gates, states and outputs of a linear mixer, read and written once."""
    if layer.mixer == "delta" and model.delta:
        return BF16 * 4 * (2 * model.delta.keys + 2 * model.delta.values)
    if layer.mixer == "mamba" and model.mamba:
        spec = model.mamba
        return BF16 * 4 * (2 * spec.inner_dim + 2 * spec.num_groups * spec.state_dim)
    return 0.0
