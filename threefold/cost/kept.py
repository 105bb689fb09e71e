"""What our own engine keeps of a layer from forward to backward: bytes on one rank for one microbatch, by memory term.

Counted from the code of `engine/`, tensor by tensor; the rehearsal, which runs that code, holds these numbers to it.
`t` counts the tokens a rank holds between modules, `s` those inside a module cut by tensor parallel, `r` experts' rows.
"""

from dataclasses import dataclass

from threefold.plan.plan import Plan
from threefold.spec.model import DeltaSpec, GqaSpec, Layer, MlaSpec, ModelSpec

FP32, INDEX = 4, 8
CHUNK = 64  # tokens of the delta rule's chunks
_ZERO_CENTRED = ("qwen3_next",)  # norms that store weight - 1, and are computed in fp32 piece by piece


@dataclass(frozen=True)
class Share:
    """A rank's part of a microbatch."""

    plan: Plan
    skew: float = 1.0

    @property
    def model(self) -> ModelSpec:
        return self.plan.model

    @property
    def width(self) -> int:
        return 4 if self.plan.knobs.precision == "fp32" else 2

    @property
    def narrow(self) -> bool:
        return self.width == 2

    @property
    def tp(self) -> int:
        return self.plan.layout.tp

    @property
    def s(self) -> float:
        return self.plan.job.micro_batch * self.plan.job.seq_len / self.plan.layout.cp

    @property
    def t(self) -> float:
        return self.s / self.tp

    @property
    def sent(self) -> float:
        """Rows that leave for the experts."""
        return self.t * self.model.moe.top_k if self.model.moe else 0.0

    @property
    def r(self) -> float:
        """Rows at the experts of a rank; every slice of an expert sees those of all slices."""
        job = self.plan.job
        padded = job.capacity_factor is not None and job.capacity_scope == "expert"
        load = job.capacity_factor if padded and job.capacity_factor is not None else self.skew
        return self.sent * load * self.plan.layout.etp

    @property
    def again(self) -> frozenset[str]:
        return frozenset(self.plan.knobs.recompute)

    @property
    def gathers(self) -> bool:
        return self.tp > 1


def layer_kept(share: Share, layer: Layer) -> dict[str, float]:
    if "full" in share.again:
        return {"norms": share.width * share.model.dim * share.t}
    kept = {"norms": _norm(share, layer.mixer != "none", _mixer_reads_norm(share, layer))}
    kept["norms"] += _norm(share, layer.ffn != "none", _ffn_reads_norm(share, layer))
    kept["attention"] = _mixer(share, layer)
    if layer.ffn == "dense":
        kept["mlp"] = 0.0 if "mlp" in share.again else mlp(share, share.model.dense_dim, share.gathers)
    elif layer.ffn == "moe" and "moe" not in share.again:
        kept |= {"router": _router(share), "dispatch": _dispatch(share), "experts": _experts(share)}
        kept["shared_experts"] = _shared(share)
    return kept


def _norm(share: Share, there: bool, output: bool) -> float:
    """Its input, one number a row, and its output where a product keeps it."""
    if not there:
        return 0.0
    dim = share.model.dim
    inside = 2 * FP32 * dim if share.model.family in _ZERO_CENTRED and share.narrow else share.width * dim
    return share.t * (inside + FP32 + (share.width * dim if output else 0))


def _mixer_reads_norm(share: Share, layer: Layer) -> bool:
    """Cut modules read what they gathered; MLA gathers behind its first products."""
    is_mla = layer.mixer == "attention" and isinstance(share.model.attention, MlaSpec)
    return "layernorm" not in share.again and (is_mla or not share.gathers)


def _ffn_reads_norm(share: Share, layer: Layer) -> bool:
    whole = {"dense": "mlp", "moe": "moe"}[layer.ffn] in share.again if layer.ffn in ("dense", "moe") else False
    if whole:
        return True  # the input of what is recomputed
    if "layernorm" in share.again:
        return False
    moe = share.model.moe
    if layer.ffn == "moe" and moe:
        return not share.narrow or bool(moe.shared_gate) or (bool(moe.shared_width) and not share.gathers)
    return not share.gathers


def _entered(share: Share, products: int) -> float:
    """The sequence as a cut module gathers it; of several sequences each product that reads it keeps a copy of its own,
    because they lie the other way round."""
    if not share.gathers or "layernorm" in share.again:
        return 0.0
    return share.width * share.model.dim * share.s * (products if share.plan.job.micro_batch > 1 else 1)


def _mixer(share: Share, layer: Layer) -> float:
    model = share.model
    if layer.mixer == "delta" and model.delta:
        return _entered(share, 2) + _delta(share, model.delta) * share.s
    spec = model.attention if layer.mixer == "attention" else model.local_attention
    if layer.mixer not in ("attention", "window") or spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return _mla(share, spec)
    return _entered(share, 3) + _gqa(share, spec) * share.s


def _gqa(share: Share, spec: GqaSpec) -> float:
    """A token: queries and keys before their norm and behind rotation, values, the output twice (as the kernel and as
    the product behind it want it), tables of the rotation."""
    b, head = share.width, spec.head_dim
    q, kv = spec.q_dim / share.tp, max(1.0, spec.num_kv_heads / share.tp) * head
    heads = q / head
    in_fp32 = share.model.family in _ZERO_CENTRED and share.narrow
    kept = b * (q + 2 * kv)  # ready to attend
    if spec.gated:
        kept += 2 * b * q + b * q  # query with gate, as projected; the gate's sigmoid
    if spec.qk_norm:
        inside = 2 * FP32 * (q + kv) if in_fp32 else b * ((0 if spec.gated else q) + kv)
        kept += inside + FP32 * (q + kv) / head
    core = b * q + FP32 * heads
    if "core_attn" not in share.again:
        kept += core + b * q
    if share.narrow:
        kept += 4 * b * head * spec.rope_fraction / 2
    return kept + (INDEX if spec.sinks else 0)


def _mla(share: Share, spec: MlaSpec) -> float:
    b, t, s = share.width, share.t, share.s
    heads = spec.num_heads / share.tp
    q_rank = spec.q_rank or 0
    low = b * t * (q_rank + spec.kv_rank + spec.rope_dim) + FP32 * t * ((1 if q_rank else 0) + 1)
    joined = q_rank + spec.kv_rank + (spec.rope_dim if share.gathers else 0)
    low += b * joined * (s if share.gathers else t)
    if share.gathers and not q_rank:
        low += b * share.model.dim * s
    # Queries and keys joined with their rotated parts; keys and values lie in one tensor, of which values are kept.
    up = 0.0 if "mla_up_proj" in share.again else b * heads * (2 * spec.qk_dim + spec.nope_dim + spec.v_dim) * s
    if share.narrow and "mla_up_proj" not in share.again:
        up += 4 * b * spec.rope_dim / 2 * s
    core = 0.0 if "core_attn" in share.again else (2 * b * heads * spec.v_dim + FP32 * heads) * s
    return low + up + core


def _delta(share: Share, spec: DeltaSpec) -> float:
    """A token, in plain torch: chunks of q, k and v in fp32 with all that their products keep, and the state of every
    chunk."""
    b, heads = share.width, spec.num_v_heads / share.tp
    k, v = spec.k_dim, spec.v_dim
    channels = (2 * spec.keys + spec.values) / share.tp
    inside = 40 * k + 8 * (k + v) + 4 * v + 4 * k * v / CHUNK + 20 * CHUNK
    if share.plan.layout.cp > 1 and share.plan.knobs.cp_comm != "a2a":
        inside += 4 * (k + v) * (1 + k / CHUNK)  # what every chunk makes of any state that comes from other ranks
    behind = (2 * FP32 if share.narrow else 1) * v + 3 * b * v + FP32
    if "gdn_norm_out" in share.again:
        behind = b * v
    return heads * (inside + behind) + 2 * b * channels + 8 * FP32 * heads


def mlp(share: Share, hidden: float, entered: bool) -> float:
    """Gate, up, the activation and the product of both."""
    kept = 4 * share.width * hidden / share.tp * share.s
    return kept + (_entered(share, 2) if entered else 0.0)


def _router(share: Share) -> float:
    """In fp32: the tokens, the weight, the scores, the sorted places of all experts, of which the first are used."""
    moe, job = share.model.moe, share.plan.job
    assert moe is not None
    each = FP32 * moe.num_experts
    if job.routing == "forced-balance":
        each += INDEX * moe.top_k
    else:
        each += INDEX * moe.num_experts
    if moe.score == "softmax" and moe.norm_topk:
        each += FP32 * moe.num_experts
    each += 2 * FP32 * moe.top_k
    widened = FP32 * share.model.dim * (share.t + moe.num_experts) if share.narrow else 0.0
    return widened + each * share.t


def _dispatch(share: Share) -> float:
    """Rows by expert, which the first product keeps, and who they are."""
    layout = share.plan.layout
    travels = layout.ep * layout.etp > 1
    known = INDEX * (2 * share.sent + (2 * share.r if travels else 0)) + FP32 * share.r
    return share.width * share.model.dim * share.r + known


def _experts(share: Share) -> float:
    """Gate with up, the activation, its product with up, and that times the router's weight."""
    moe, model = share.model.moe, share.model
    assert moe is not None
    hidden = moe.expert_dim / share.plan.layout.etp
    if share.plan.knobs.expert_fusion or "moe_act" in share.again:
        times = 2.0
    else:
        times = 5.0 if model.activation == "silu" else 8.0
    # The last bias, a row each, is kept to be multiplied by the router's weight.
    biases = (share.width * model.dim + 2 * INDEX) * share.r if moe.bias else 0.0
    return times * share.width * hidden * share.r + biases


def _shared(share: Share) -> float:
    moe = share.model.moe
    assert moe is not None
    if not moe.shared_width or "shared_experts" in share.again:
        return 0.0
    gate = share.width * (share.model.dim + 2) * share.t if moe.shared_gate else 0.0
    return mlp(share, moe.shared_width, share.gathers) + gate
