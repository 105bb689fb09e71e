"""What our own engine keeps of a layer from forward to backward: bytes on one rank for one microbatch, by memory term.

Counted from the code of `engine/`, tensor by tensor; the rehearsal, which runs that code, holds these numbers to it.
"""

from threefold.cost.share import FP32, INDEX, Share
from threefold.spec.model import DeltaSpec, GqaSpec, Layer, MlaSpec

BLOCK = 128  # rows of an expert that share scales
CHUNK = 64  # tokens of the delta rule's chunks
_ZERO_CENTRED = ("qwen3_next",)  # norms that store weight - 1, and are computed in fp32 piece by piece


def layer_kept(share: Share, layer: Layer) -> dict[str, float]:
    if "full" in share.again:
        return {"norms": share.width * share.model.dim * share.t / share.unit}
    kept = {"norms": _norm(share, layer.mixer != "none", share.input * mixer_reads_norm(share, layer))}
    routed = layer.ffn == "moe" or _ffn_again(share, layer)  # reads the norm's output as it is
    output = share.width if routed else share.input
    kept["norms"] += _norm(share, layer.ffn != "none", output * _ffn_reads_norm(share, layer))
    kept["attention"] = mixer(share, layer)
    if layer.ffn == "dense":
        kept["mlp"] = 0.0 if "mlp" in share.again else mlp(share, share.model.dense_dim, share.gathers)
    elif layer.ffn == "moe" and "moe" not in share.again:
        kept |= {"router": _router(share), "dispatch": _dispatch(share), "experts": experts(share)}
        kept["shared_experts"] = _shared(share)
    return kept


def layer_again(share: Share, layer: Layer, plain: Share) -> dict[str, float]:
    """What a layer holds where it is made again, at most; `plain`: the same without recompute."""
    made = layer_kept(plain, layer)
    cut = dict.fromkeys(("dispatch", "experts", "shared_experts"), share.at_once) | {"mlp": share.mlp_at_once}
    made = {name: size * cut.get(name, 1.0) for name, size in made.items()}
    spec = share.model.attention
    if layer.mixer == "attention" and isinstance(spec, MlaSpec):
        made["attention"] -= mla_up(plain, spec) * (1 - share.heads_at_once)
    return made


def made_late(share: Share, layer: Layer, plain: Share) -> float:
    """Of that, what waits for the mixer's backward: MLA's heads, where only some are made at a time."""
    spec = share.model.attention
    if layer.mixer != "attention" or not isinstance(spec, MlaSpec) or share.heads_at_once == 1:
        return 0.0
    return mla_up(plain, spec) * share.heads_at_once


def _norm(share: Share, there: bool, output: float) -> float:
    """Its input, in plain torch one number a row, and of an element of its output `output` bytes."""
    if not there:
        return 0.0
    dim = share.model.dim
    return share.t * (normed(share, dim) + output * dim)


def normed(share: Share, dim: float, groups: float = 1) -> float:
    """Kept inside of norms of so many numbers a token, in `groups`."""
    if share.fused:
        return share.width * dim
    return (2 * FP32 if in_fp32(share) else share.width) * dim + FP32 * groups


def mixer_reads_norm(share: Share, layer: Layer) -> bool:
    """Cut modules read what they gathered; MLA gathers behind its first products."""
    is_mla = layer.mixer == "attention" and isinstance(share.model.attention, MlaSpec)
    return "layernorm" not in share.again and (is_mla or not share.gathers)


def _ffn_again(share: Share, layer: Layer) -> bool:
    return {"dense": "mlp", "moe": "moe"}.get(layer.ffn) in share.again


def _ffn_reads_norm(share: Share, layer: Layer) -> bool:
    if "layernorm" in share.again:
        return False
    if _ffn_again(share, layer):
        return True  # the input of what is recomputed
    moe = share.model.moe
    if layer.ffn == "moe" and moe:
        router = share.fused or not share.narrow
        return router or bool(moe.shared_gate) or (bool(moe.shared_width) and not share.gathers)
    return not share.gathers


def entering(share: Share) -> float:
    """The sequence as a cut module gathers it."""
    again = not share.gathers or "layernorm" in share.again
    return 0.0 if again else share.input * share.model.dim * share.s


def mixer(share: Share, layer: Layer) -> float:
    model = share.model
    if layer.mixer == "delta" and model.delta:
        return entering(share) + _delta(share, model.delta) * share.s + _passed(share, model.delta)
    spec = model.attention if layer.mixer == "attention" else model.local_attention
    if layer.mixer not in ("attention", "window") or spec is None:
        return 0.0
    scores = 0.0 if "core_attn" in share.again else share.scores(spec) + share.beside_scores(spec)
    if isinstance(spec, MlaSpec):
        return _mla(share, spec) + scores
    return entering(share) + _gqa(share, spec) * share.s + scores


def _gqa(share: Share, spec: GqaSpec) -> float:
    """A token: queries and keys before their norm and behind rotation, values, the output (in plain torch twice, as the
    kernel and as the product behind it want it), tables of the rotation."""
    b, head = share.width, spec.head_dim
    q, kv = spec.q_dim / share.tp, max(1.0, spec.num_kv_heads / share.tp) * head
    heads = q / head
    kept = b * (q + 2 * kv)  # ready to attend
    if spec.gated:
        kept += 2 * b * q + b * q  # query with gate, as projected; the gate's sigmoid
    if spec.qk_norm:
        kept += normed(share, q + kv, (q + kv) / head) - (b * q if spec.gated and not in_fp32(share) else 0)
    if "core_attn" not in share.again:
        kept += b * q + FP32 * heads + (share.input * q if spec.gated or not share.fused else 0)
        kept += b * q if share.fused and share.plan.layout.cp > 1 else 0  # a ring's lies head by head
    if share.narrow and not share.fused:
        kept += 4 * b * head * spec.rope_fraction / 2
    return kept + (INDEX if spec.sinks else 0)


def in_fp32(share: Share) -> bool:
    """Norms that are computed piece by piece."""
    return share.model.family in _ZERO_CENTRED and share.narrow and not share.fused


def _mla(share: Share, spec: MlaSpec) -> float:
    b, heads = share.width, spec.num_heads / share.tp
    up = 0.0 if "mla_up_proj" in share.again else mla_up(share, spec)
    outputs = 2 if output_apart(share, spec) else 1
    core = 0.0 if "core_attn" in share.again else heads * (outputs * b * spec.v_dim + FP32) * share.s
    return mla_low(share, spec) + up + core


def mla_low(share: Share, spec: MlaSpec) -> float:
    """Latents before their norms and behind, as the way up reads them."""
    b, t, q_rank = share.width, share.t, spec.q_rank or 0
    low = b * t * (q_rank + spec.kv_rank + spec.rope_dim)
    low += 0 if share.fused else FP32 * t * ((1 if q_rank else 0) + 1)
    joined = q_rank + spec.kv_rank + (spec.rope_dim if share.gathers else 0)
    low += share.input * joined * (share.s if share.gathers else t)
    if share.gathers and not q_rank:
        low += b * share.model.dim * share.s
    return low


def output_apart(share: Share, spec: GqaSpec | MlaSpec) -> bool:
    """Whether the product behind attention keeps another tensor than the kernel, whose output lies as it wants it:
    not in plain torch, behind a gate, or where a sequence is spread over ranks."""
    spread = share.plan.layout.cp > 1
    if isinstance(spec, MlaSpec):
        return not share.fused or (spread and share.plan.knobs.cp_comm == "all_gather")
    return spec.gated or not share.fused or spread


def mla_up(share: Share, spec: MlaSpec) -> float:
    """Queries and keys joined with their rotated parts; keys and values lie in one tensor, of which values are kept."""
    b, heads = share.width, spec.num_heads / share.tp
    return b * heads * (2 * spec.qk_dim + spec.nope_dim + spec.v_dim) * share.s


def _delta(share: Share, spec: DeltaSpec) -> float:
    """A token, in plain torch: chunks of q, k and v in fp32 with all that their products keep, and the state of every
    chunk."""
    b, heads = share.width, spec.num_v_heads / share.tp
    k, v = spec.k_dim, spec.v_dim
    channels = (2 * spec.keys + spec.values) / share.tp
    inside = 40 * k + 8 * (k + v) + 4 * v + 4 * k * v / CHUNK + 20 * CHUNK
    if _ring(share):
        inside += 4 * (k + v) * (1 + k / CHUNK)  # what every chunk makes of any state that comes from other ranks
    behind = (2 * FP32 if share.narrow else 1) * v + 3 * b * v + FP32
    if "gdn_norm_out" in share.again:
        behind = b * v
    mixed = 3 if _ring(share) and share.plan.job.micro_batch > 1 else 2  # spans of several sequences are copied out
    return heads * (inside + behind) + mixed * b * channels + 8 * FP32 * heads


def _ring(share: Share) -> bool:
    return share.plan.layout.cp > 1 and share.plan.knobs.cp_comm != "a2a"


def _passed(share: Share, spec: DeltaSpec) -> float:
    """The delta rule's states and their decays of both spans of every rank, and the one that came."""
    each = FP32 * spec.num_v_heads / share.tp * spec.k_dim * (spec.k_dim + spec.v_dim)
    return share.plan.job.micro_batch * each * (2 * share.plan.layout.cp + 1) if _ring(share) else 0.0


def mlp(share: Share, hidden: float, entered: bool) -> float:
    """Gate, up, the product of both, and in plain torch the activation."""
    kept = ((2 if share.fused else 3) * share.width + share.input) * hidden / share.tp * share.s
    return kept + (entering(share) if entered else 0.0)


def _router(share: Share) -> float:
    """The logits, the choice, and the scores where a loss looks at them; in plain torch tokens and weight in fp32, and
    the sorted places of all experts, of which the first are used."""
    moe, job = share.model.moe, share.plan.job
    assert moe is not None
    each = FP32 * moe.num_experts
    if share.fused:
        scores = FP32 * (moe.num_experts + 1) if job.aux_loss or job.seq_aux_loss else 0
        return (each + INDEX * moe.top_k + scores) * share.t
    each += INDEX * (moe.top_k if job.routing == "forced-balance" else moe.num_experts)
    if moe.score == "softmax" and moe.norm_topk:
        each += FP32 * moe.num_experts
    each += 2 * FP32 * moe.top_k
    widened = FP32 * share.model.dim * (share.t + moe.num_experts) if share.narrow else 0.0
    return widened + each * share.t


def _dispatch(share: Share) -> float:
    """Rows by expert, which the first product keeps, and who they are."""
    layout = share.plan.layout
    if share.in_one:
        return 3 * FP32 * share.sent
    travels = layout.ep * layout.etp > 1
    known = INDEX * (2 * share.sent + (2 * share.r if travels else 0)) + FP32 * share.r
    return (0 if share.low else share.width) * share.model.dim * share.r + known


def experts(share: Share) -> float:
    """Gate with up, the activation, its product with up, and that times the router's weight."""
    moe, model = share.model.moe, share.model
    assert moe is not None
    hidden = moe.expert_dim / share.plan.layout.etp
    # The last bias, a row each, is kept to be multiplied by the router's weight.
    biases = (share.width * model.dim + 2 * INDEX) * share.r if moe.bias else 0.0
    times = 5.0 if model.activation == "silu" else 8.0
    if share.fused_experts:
        padded = share.r + BLOCK * moe.num_experts / share.plan.layout.ep
        return 2 * share.width * hidden * share.r + share.low * model.dim * (padded if share.low else 0)
    if "moe_act" in share.again:
        times, act = 2.0, 0.0
    else:
        act = share.low * hidden
    if share.low:
        return ((times - (1 if act else 0)) * share.width * hidden + act + share.low * model.dim) * share.r + biases
    return times * share.width * hidden * share.r + biases


def _shared(share: Share) -> float:
    moe = share.model.moe
    assert moe is not None
    if not moe.shared_width or "shared_experts" in share.again:
        return 0.0
    gate = share.width * (share.model.dim + 2) * share.t if moe.shared_gate else 0.0
    narrow = 0.0 if share.gathers else share.low * share.model.dim * share.t
    return mlp(share, moe.shared_width, share.gathers) + gate + narrow
