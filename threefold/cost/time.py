"""Seconds of a step, by term: compute, memory-bound kernels, exchanges left exposed, bubble, host, optimizer."""

from dataclasses import dataclass, replace

from threefold.cost.away import offload_seconds
from threefold.cost.beside import Part, Parts, hidden_seconds
from threefold.cost.exchange import (
    collective_seconds,
    context_seconds,
    dispatch_seconds,
    expert_tensor_seconds,
    tensor_seconds,
)
from threefold.cost.formats import experts_emulated, experts_priced_as, priced_as
from threefold.cost.memory import STATE_BYTES
from threefold.cost.own import OWN
from threefold.cost.place import KeptLayer, chunk_layers
from threefold.cost.rates import Rates, gemm_rate, peak
from threefold.cost.share import Share
from threefold.cost.work import BF16, IMAGE_PATCHES, Work, case_of, layer_work
from threefold.layout.links import AxisLink
from threefold.layout.stages import chunk_rank
from threefold.plan.plan import INSIDE_MOE, Plan
from threefold.spec.flops import layer_flops, padded_vocab
from threefold.spec.model import GqaSpec, Layer, MlaSpec
from threefold.spec.params import count_params, expert_params

TERMS = (
    "gemm",
    "experts",
    "attention",
    "elementwise",
    "quantise",
    "recompute",
    "tp",
    "cp",
    "ep",
    "host",
    "loss",
    "vision",
    "bubble",
    "dp",
    "optimizer",
    "offload",
    "other",
)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer for one microbatch, forward and backward together, by term."""

    gemm: float
    experts: float
    attention: float
    elementwise: float
    quantise: float
    recompute: float
    tp: float
    cp: float
    ep: float
    host: float

    @property
    def total(self) -> float:
        busy = self.gemm + self.experts + self.attention + self.elementwise + self.quantise + self.recompute
        return busy + self.tp + self.cp + self.ep + self.host

    @property
    def forward(self) -> float:
        return self.total / 3


def layer_time(plan: Plan, layer: Layer, rates: Rates, skew: float = 1.0) -> LayerTime:
    """Forward and backward of one layer on one rank; `skew` is the busiest expert rank's load."""
    if isinstance(layer, KeptLayer):
        plan = replace(plan, knobs=replace(plan.knobs, recompute=()))
    case = case_of(plan, layer, skew)
    work = layer_work(case)
    knobs, chip = plan.knobs, plan.chip
    low = plan.low_precision
    bandwidth = chip.memory_bandwidth * rates.memory
    rate = gemm_rate(rates, plan, priced_as(plan), work.dense_rows)
    passes, weights = _products(plan)
    gemm_once = work.dense_flops / rate
    gemm = passes * gemm_once
    experts, fwd_experts = 0.0, 0.0
    if work.grouped_flops:
        full = gemm_rate(rates, plan, experts_priced_as(plan), 1e9) * rates.grouped
        grouped_rate = full * work.rows_per_expert / (work.rows_per_expert + rates.grouped_rows)
        fwd_experts = max(work.grouped_flops / grouped_rate, work.weight_bytes / bandwidth)
        accumulate = work.weight_bytes * (4 if knobs.grad_dtype == "fp32" else 2)  # gradients read and written
        experts = passes * fwd_experts + weights * accumulate / bandwidth
    attention = _attention_seconds(plan, work, rates)
    # No fused kernel takes biased experts, or what is emulated.
    plain = plan.model.moe is None or not (plan.model.moe.bias or experts_emulated(plan))
    fused = rates.fusion if knobs.expert_fusion and plain else 1.0
    sent = 0.0
    if knobs.dispatcher == "alltoall" and plan.layout.ep > 1 and work.grouped_flops:
        sent = 2 * work.dispatch_tokens * (plan.model.moe.top_k if plan.model.moe else 0) * BF16 * plan.model.dim
    moved = work.moved_bytes + work.expert_moved_bytes * fused + sent
    elementwise = 3 * moved * rates.passes / bandwidth + 3 * work.scan_bytes * rates.scan / bandwidth
    quant_once = 0.0
    if low:
        elements = work.quant_elements + work.expert_quant_elements * fused
        quant_once = elements * 4 * rates.quant_passes / bandwidth
    quantise = passes * quant_once
    sequence = tensor_seconds(plan, case, work, rates) * (0.5 if knobs.tp_overlap else 1.0)
    tp = 2.5 * sequence
    if layer.mixer == "delta":  # the state passes from chunk to chunk, however many ranks share the heads
        elementwise += case.seq_len / 64 * rates.chunk_seconds
    ring = context_seconds(plan, case, rates)
    cp = max(0.1 * 3 * ring.hidden, 3 * ring.hidden - attention) + 2.5 * ring.exposed
    forward = Forward(gemm_once, fwd_experts, attention / 3.5, elementwise / 3, quant_once, sequence)
    recompute = _recompute_seconds(plan, layer, forward, work, rates)
    exchange = dispatch_seconds(plan, work, rates) + expert_tensor_seconds(plan, work, rates)
    ep = exchange * (6 if "moe" in knobs.recompute or plan.full_recompute else 4)
    busy = gemm + experts + attention + elementwise + quantise + recompute
    if knobs.ep_overlap and exchange:
        inner = (sent + work.permuted_bytes + work.expert_moved_bytes * fused) * rates.passes / bandwidth
        inner += work.expert_quant_elements * fused * 4 * rates.quant_passes / bandwidth if low else 0.0
        parts = _parts(plan, layer, forward, inner, experts - fwd_experts, busy + tp + cp)
        hidden = hidden_seconds(plan, exchange, parts, rates.hidden)
        slower = rates.contention * (2.5 if knobs.dispatcher == "alltoall" else 1.0)
        ep += (slower - 1) * hidden
    host = _host_seconds(plan, layer, rates)
    gpu = busy + tp + cp + ep
    # Launches run ahead of the GPU: only what exceeds its time shows, softly where the two are close.
    waiting = (gpu**4 + host**4) ** 0.25 - gpu
    if knobs.dispatcher == "alltoall" and plan.layout.ep > 1 and work.grouped_flops:
        waiting += rates.sync_seconds
    return LayerTime(gemm, experts, attention, elementwise, quantise, recompute, tp, cp, ep, waiting)


def _products(plan: Plan) -> tuple[int, int]:
    """Products a weight is in, forward and backward, and how many of them give its own gradient: none if it is frozen.

    Through a frozen language model gradients still pass, to what makes embeddings of images.
    """
    return (2, 0) if "language" in plan.job.freeze else (3, 1)


def _attention_seconds(plan: Plan, work: Work, rates: Rates) -> float:
    """Forward once and backward 2.5 times: the fused backward recomputes the scores."""
    share = rates.attention_blackwell if plan.chip.architecture == "blackwell" else rates.attention
    top = peak(plan.chip, "bf16") * (1.3 if plan.knobs.fp8_attention else 1.0)
    spec = plan.model.attention
    head = spec.head_dim if isinstance(spec, GqaSpec) else 160
    share *= rates.attention_latent if isinstance(spec, MlaSpec) else 1.0
    # An exponential a score costs about what 64 columns of the head do; narrow heads pay it more often.
    seconds = 3.5 * work.attention_flops * (1 + 64 / head) / 1.5 / (top * share)
    if work.score_bytes and not plan.knobs.fp8_attention:
        seconds += work.score_bytes * rates.sink_passes / (plan.chip.memory_bandwidth * rates.memory)
    return seconds


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward seconds of a layer, by part."""

    gemm: float
    experts: float
    attention: float
    elementwise: float
    quantise: float
    tp: float


def _parts(plan: Plan, layer: Layer, once: Forward, inner: float, experts_back: float, total: float) -> Parts:
    """A layer that takes `total` seconds, less its exchanges, as EP overlap sees it. `inner`: what experts take beside
    their products, forward."""
    flops = layer_flops(plan.model, layer, plan.job.seq_len)
    shared = once.gemm * flops.shared / max(1.0, flops.shared + flops.projections)
    passes, weights = _products(plan)
    experts = Part(once.experts + inner, experts_back + 2 * inner, weights * experts_back / 2)
    mixer = once.gemm - shared + once.attention + once.elementwise + once.quantise + once.tp - inner
    back = total - mixer - passes * shared - experts.forward - experts.backward
    return Parts(Part(mixer, back, weights * (once.gemm - shared)), experts, Part(shared, (passes - 1) * shared))


def _recompute_seconds(plan: Plan, layer: Layer, once: Forward, work: Work, rates: Rates) -> float:
    """What is done again in backward, module by module."""
    names, ours = _made_again(plan), plan.target == OWN
    if not names:
        return 0.0
    if "full" in names:
        return once.gemm + once.experts + once.attention + once.elementwise + once.quantise + once.tp
    flops = layer_flops(plan.model, layer, plan.job.seq_len)
    dense = flops.projections + flops.shared + (flops.ffn if layer.ffn == "dense" else 0.0)
    multiplied = once.gemm + once.quantise * (0.3 if layer.ffn == "moe" else 1.0)  # the rest belongs to experts
    bandwidth = plan.chip.memory_bandwidth * rates.memory
    again = 0.0
    if "core_attn" in names:
        again += once.attention
    if "layernorm" in names:
        again += 2 * 3 * BF16 * plan.model.dim * work.dense_rows / plan.layout.tp * rates.passes / bandwidth
    if layer.ffn == "moe":
        act = work.expert_moved_bytes * rates.passes / bandwidth
        if "moe" in names:
            again += once.experts + act + 0.5 * once.elementwise + 0.7 * once.quantise
        elif "moe_act" in names:
            again += act
        if "shared_experts" in names or (ours and "moe" in names):
            again += multiplied * flops.shared / dense
    elif "mlp" in names and layer.ffn == "dense":
        again += multiplied * flops.ffn / dense + once.tp / 4  # its input is gathered again
    if "mla_up_proj" in names and layer.mixer == "attention" and isinstance(plan.model.attention, MlaSpec):
        spec = plan.model.attention
        up = spec.num_heads * ((spec.q_rank or 0) * spec.qk_dim + spec.kv_rank * (spec.nope_dim + spec.v_dim))
        again += multiplied * 2 * up / dense
    if "gdn_norm_out" in names and ours and layer.mixer == "delta" and plan.model.delta:
        # The delta rule's output and the gate are read, and their product is written.
        again += 3 * BF16 * plan.model.delta.values * work.dense_rows / plan.layout.tp * rates.passes / bandwidth
    return again


def _made_again(plan: Plan) -> set[str]:
    """In our own engine what lies inside of another module is made with that, and the activation of fused experts is
    made in their backward whether it is named or not."""
    names = set(plan.knobs.recompute)
    if plan.target != OWN:
        return names
    if "full" in names:
        return {"full"}
    if "moe" in names:
        names -= INSIDE_MOE
    return names - {"moe_act"} if Share(plan).fused_experts else names


# Launches a recomputed module adds, of a layer's; read off a launch-bound published A/B (Moonlight on 8 H100).
_LAUNCHED_AGAIN = {
    "layernorm": 0.30,
    "core_attn": 0.18,
    "moe_act": 0.09,
    "mla_up_proj": 0.26,
    "mlp": 0.14,
    "shared_experts": 0.14,
    "moe": 0.60,
    "full": 1.0,
}


def _host_seconds(plan: Plan, layer: Layer, rates: Rates) -> float:
    """Launches of a layer, forward and backward; captured scopes leave a little."""
    knobs = plan.knobs
    if plan.chip.architecture == "cpu" or "full_iteration" in knobs.graphs:
        return 0.0
    mixer = rates.host_mixer_seconds if layer.mixer != "none" else 0.0
    ffn = (
        rates.host_moe_seconds if layer.ffn == "moe" else 0.4 * rates.host_moe_seconds if layer.ffn == "dense" else 0.0
    )
    scope = "mamba" if layer.mixer == "mamba" else "attn"
    if scope in knobs.graphs:
        mixer *= rates.host_graphed
    if layer.ffn == "moe":
        captured = 0.25 * ("moe_router" in knobs.graphs) + 0.25 * ("moe_preprocess" in knobs.graphs)
        captured = 1.0 if "moe" in knobs.graphs else captured
        ffn *= 1 - captured * (1 - rates.host_graphed)
    if plan.low_precision:  # quantisation launches sit mostly around the experts
        mixer *= 1 + (rates.host_fp8 - 1) / 3
        ffn *= rates.host_fp8 if layer.ffn == "moe" else 1 + (rates.host_fp8 - 1) / 3
    total = mixer + ffn
    if plan.chip.is_rack_scale:
        total *= rates.host_grace
    return total * (1 + sum(_LAUNCHED_AGAIN.get(name, 0.0) for name in _made_again(plan)))


def loss_seconds(plan: Plan, rates: Rates) -> float:
    """Embedding, output layer and cross entropy of one microbatch, forward and backward."""
    tokens = plan.job.micro_batch * plan.job.seq_len / plan.layout.cp
    vocab = padded_vocab(plan.model, plan.layout.tp) / plan.layout.tp
    flops = 2 * _products(plan)[0] * plan.model.dim * vocab * tokens
    moved = tokens * vocab * 14  # logits written, read for the loss, its gradient written and read twice
    precision = plan.knobs.precision if plan.knobs.fp8_output else "bf16"
    return flops / gemm_rate(rates, plan, precision, tokens) + moved / (plan.chip.memory_bandwidth * rates.memory)


def vision_seconds(plan: Plan, rates: Rates) -> float:
    """The image encoder on one microbatch, forward and backward; a frozen one runs forward only."""
    vision = plan.model.vision
    if vision is None:
        return 0.0
    images = 1.0 if plan.job.images is None else plan.job.images
    patches = images * plan.job.micro_batch * IMAGE_PATCHES
    per_patch = vision.depth * (8 * vision.dim**2 + 4 * vision.dim * vision.mlp_dim + 4 * IMAGE_PATCHES * vision.dim)
    passes = 1 if "vision" in plan.job.freeze else 3
    return passes * patches * per_patch / gemm_rate(rates, plan, "bf16", max(1.0, patches))


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step with its terms, in seconds."""

    step_seconds: float
    terms: dict[str, float]


def step_time(plan: Plan, rates: Rates, skew: float = 1.0) -> StepTime:
    """The step: the slowest stage times microbatches, fill and drain, then what follows the last backward."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    stages = _stage_layers(plan)
    kinds = {layer: layer_time(plan, layer, rates, skew) for layer in {each for kept, _, _ in stages for each in kept}}
    join, loss = _join_seconds(plan, rates), loss_seconds(plan, rates)
    vision = vision_seconds(plan, rates)
    loads = [sum(kinds[layer].total for layer in layers) + m * join + e * loss for layers, m, e in stages]
    loads[0] += vision
    away = [
        offload_seconds(plan, layers, load, rates, skew) for (layers, _, _), load in zip(stages, loads, strict=True)
    ]
    loads = [load + more for load, more in zip(loads, away, strict=True)]
    slowest = max(range(len(loads)), key=loads.__getitem__)
    busiest = loads[slowest]
    hop = _hop_seconds(plan, rates)
    bubble = 0.0
    if layout.pp > 1:
        chunk = (sum(loads) - busiest) / layout.vpp
        if layout.schedule in ("zero-bubble", "dualpipev"):
            chunk /= 3
        bubble = chunk + hop * (2 * (layout.pp - 1) + (0.0 if layout.vpp > 1 else 2.0 * count))
    terms = dict.fromkeys(TERMS, 0.0)
    layers, m, e = stages[slowest]
    for layer in layers:
        one = kinds[layer]
        for name in LayerTime.__slots__:
            terms[name] += getattr(one, name) * count
    terms["gemm"] += m * join * count
    terms["loss"] = e * loss * count
    terms["vision"] = vision * count if slowest == 0 else 0.0
    terms["bubble"] = bubble
    terms["dp"] = _data_seconds(plan, busiest, rates)
    terms["optimizer"], terms["offload"] = _optimizer_seconds(plan, rates)
    terms["offload"] += away[slowest] * count
    terms["other"] = rates.step_seconds
    drift = rates.drift.get(plan.stack.release or "", 1.0)
    terms = {name: value * drift for name, value in terms.items()}
    return StepTime(sum(terms.values()), terms)


def _join_seconds(plan: Plan, rates: Rates) -> float:
    """The product with which an MTP depth begins: hidden state and next embedding become one."""
    tokens = plan.job.micro_batch * plan.job.seq_len / plan.layout.cp
    flops = 2 * _products(plan)[0] * 2 * plan.model.dim**2 * tokens / plan.layout.tp
    return flops / gemm_rate(rates, plan, priced_as(plan), tokens)


def _stage_layers(plan: Plan) -> list[tuple[list[Layer], int, int]]:
    """Of each pipeline rank: layers, those of MTP depths too; how many depths; losses, of which a depth has its own."""
    layout = plan.layout
    held: list[tuple[list[Layer], int, int]] = [([], 0, 0) for _ in range(layout.pp)]
    v_shaped = layout.pipeline_schedule == "dualpipev"
    for index, chunk in enumerate(plan.chunks):
        rank = chunk_rank(index, layout.pp, v_shaped)
        kept, m, e = held[rank]
        held[rank] = ([*kept, *chunk_layers(plan, chunk)], m + chunk.mtp, e + chunk.loss + chunk.mtp)
    return held


def _hop_seconds(plan: Plan, rates: Rates) -> float:
    """Hidden states of a microbatch to the next stage."""
    job, layout = plan.job, plan.layout
    payload = BF16 * plan.model.dim * job.micro_batch * job.seq_len / layout.cp / layout.tp
    link = plan.link("pp")
    rate = plan.chip.domain_bandwidth if link.link == "domain" else plan.chip.network_bandwidth
    return payload / (rate * rates.collective) + 20e-6


def rank_params(plan: Plan) -> tuple[float, float]:
    """Parameters of a rank outside and inside the routed experts, an average stage."""
    layout = plan.layout
    params = count_params(plan.model, plan.mtp)
    depths = min(plan.mtp, 1) if plan.model.mtp_shared else plan.mtp
    moe = plan.model.moe
    mtp_experts = 0
    if moe and depths:
        per_depth = sum(layer.ffn == "moe" for layer in plan.model.mtp_depth)
        mtp_experts = depths * per_depth * moe.num_experts * expert_params(plan.model)
    experts = params.experts + mtp_experts
    dense = params.total - experts
    return dense / layout.tp / layout.pp, experts / layout.ep / layout.etp / layout.pp


def trained_params(plan: Plan) -> tuple[float, float]:
    """Of these, those that get gradients: of a frozen language model the image encoder's alone."""
    dense, experts = rank_params(plan)
    if "language" not in plan.job.freeze:
        return dense, experts
    seen = count_params(plan.model).vision / plan.layout.tp / plan.layout.pp
    return seen, 0.0


def _data_seconds(plan: Plan, microbatch_seconds: float, rates: Rates) -> float:
    """Gradient reduction and parameter gathering, less what the last backward and first forward hide."""
    trained = trained_params(plan)
    layout, knobs, count = plan.layout, plan.knobs, max(1, plan.num_microbatches)
    sharded = knobs.data_parallel != "zero1"
    reduce_bytes = 4 if knobs.grad_dtype == "fp32" and sharded else 2
    gather_bytes = 1 if knobs.fp8_params and plan.low_precision else 2
    copies = layout.replicate if sharded else 1
    wide = _shard_link(plan, "dp", max(1, layout.dp * layout.cp // copies), layout.tp)
    narrow = _shard_link(plan, "edp", max(1, layout.edp // copies), layout.stride("edp"))

    def both(bytes_each: int, params: tuple[float, float]) -> float:
        one = collective_seconds(plan, wide, bytes_each * params[0], rates)
        return one + collective_seconds(plan, narrow, bytes_each * params[1], rates)

    # What is sharded is gathered whether it trains or not; else only what an update has changed.
    reduce, gather = both(reduce_bytes, trained), both(gather_bytes, rank_params(plan) if sharded else trained)
    if sharded:  # gathered twice and reduced once for every microbatch
        traffic = count * (2 * gather + reduce)
        return max(0.05 * traffic, traffic - 0.9 * microbatch_seconds * count)
    hidden_reduce = microbatch_seconds * rates.dp_hidden / layout.vpp if knobs.grad_reduce_overlap else 0.0
    hidden_gather = microbatch_seconds * rates.dp_hidden / 2 / layout.vpp if knobs.param_gather_overlap else 0.0
    return max(0.1 * reduce, reduce - hidden_reduce) + max(0.1 * gather, gather - hidden_gather)


def _shard_link(plan: Plan, axis: str, degree: int, stride: int) -> AxisLink:
    """The ranks that shard one set of parameters, as one group."""
    in_domain = max(1, min(degree, plan.cluster.domain_ranks // stride))
    return AxisLink(axis, degree, stride, in_domain, "domain" if in_domain == degree else "network")


def _optimizer_seconds(plan: Plan, rates: Rates) -> tuple[float, float]:
    """The update of this rank's share, on the GPU and on the host."""
    dense, experts = trained_params(plan)
    layout, knobs = plan.layout, plan.knobs
    mine = dense / max(1, layout.dp * layout.cp) + experts / max(1, layout.edp)
    moments = STATE_BYTES[knobs.optimizer_dtype]
    master = 2 * 4 if knobs.master_weights else 2  # both ways, or the weight alone once more
    traffic = mine * (master + 4 * moments + 4 + 2)  # moments both ways, gradient in, weight out
    host = knobs.optimizer_offload
    on_gpu = traffic * (1 - host) / (plan.chip.memory_bandwidth * rates.optimizer)
    on_host = host * mine * ((4 + 2) / plan.chip.host_bandwidth + 28 / rates.host_adam)
    return on_gpu + _orthogonal_seconds(plan), on_host


def _orthogonal_seconds(plan: Plan) -> float:
    """Muon's products with whole matrices, which every copy computes. Our own engine's are in fp32, for which a GPU has
    about an eighth of its TF32. Not calibrated: no published run has it."""
    model, layout, chip = plan.model, plan.layout, plan.chip
    if plan.job.optimizer != "muon" or "language" in plan.job.freeze:
        return 0.0
    rate = chip.peak_flops["bf16"] / 2 if plan.target != "threefold" else chip.peak_flops["fp32"]
    if plan.target == "threefold" and chip.architecture != "cpu":
        rate /= 8
    dense, experts = rank_params(plan)
    tables = 2 * model.vocab * model.dim / layout.tp / layout.pp
    sides = model.moe.expert_dim * 2 if model.moe else model.dense_dim
    flops = _orthogonal_flops(model.dim, sides) * experts
    flops += _orthogonal_flops(model.dim, model.dim) * max(0.0, dense - tables)
    return flops / rate


def _orthogonal_flops(one: int, other: int) -> float:
    """Of an element of a matrix with these sides: five times a square of the shorter side, its own, and a product."""
    short, long = sorted((one, other))
    return 5 * (4 * short + 2 * short**2 / long)
