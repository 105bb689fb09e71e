"""Bytes of a rank, by stage and named term. The peak is a moment: which stage, and when."""

from dataclasses import dataclass

from threefold.cost.gathered import num_tables
from threefold.cost.kept import layer_kept
from threefold.cost.merged import fullest
from threefold.cost.own import OWN, own_activations, own_dense, own_narrow, own_states, shared_table
from threefold.cost.pairs import pairs_of
from threefold.cost.peak import LIBRARIES, Peaks
from threefold.cost.place import Held, chunk_layers, of_layer
from threefold.cost.saved import SAVES, layer_saved, vision_saved
from threefold.cost.sent import layer_sent
from threefold.cost.share import Share
from threefold.cost.work import BF16, IMAGE_PATCHES, case_of
from threefold.layout.stages import Chunk, chunk_rank
from threefold.plan.plan import Plan
from threefold.spec.flops import padded_vocab
from threefold.spec.model import Layer
from threefold.spec.params import (
    dense_params,
    expert_params,
    mixer_params,
    norm_params,
    router_params,
    shared_params,
    vision_params,
)
from threefold.units import GIB, MIB

# Bytes of an element in the GEMM format, block scales included.
FORMAT_BYTES = {"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "fp8-blockwise": 1 + 4 / 128}
STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
CONTEXT_BYTES = 1.6 * GIB  # CUDA context and libraries
SLACK = 0.06  # of the allocator's peak, reserved beyond it: published runs show 2 to 10 %
WORKSPACE_BYTES = 192 * MIB  # GEMM workspaces
GROUP_BUFFER_BYTES = 64 * MIB  # NCCL buffers of one communicator


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One pipeline rank. `peak_bytes` is the allocator's peak; `device_bytes` adds what lies outside it."""

    stage: int
    peak_bytes: float
    terms: dict[str, float]
    moment: str
    device_bytes: float
    reserve: dict[str, float]


@dataclass(frozen=True, slots=True)
class Memory:
    stages: tuple[StageMemory, ...]

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.device_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.worst.peak_bytes

    @property
    def device_bytes(self) -> float:
        return self.worst.device_bytes


def memory(plan: Plan, skew: float = 1.0) -> Memory:
    """Every distinct stage. `skew` is the tokens of the busiest expert rank over the balanced number."""
    kinds = {layer for chunk in plan.chunks for layer in chunk_layers(plan, chunk)}
    saved = {layer: layer_bytes(plan, layer, skew) for layer in kinds}
    sent = {layer: layer_sent(Share(plan, skew), layer) for layer in kinds} if plan.target == OWN else {}
    peaks = Peaks(plan, saved, sent, skew) if plan.target == OWN else None
    return Memory(tuple(_stage(plan, stage, held, saved, skew, peaks) for stage, held in enumerate(_stages(plan))))


def layer_bytes(plan: Plan, layer: Layer, skew: float) -> dict[str, float]:
    share = of_layer(Share(plan, skew), layer)
    if plan.target == OWN:
        gone = layer_sent(share, layer).terms
        return {name: size - gone.get(name, 0.0) for name, size in layer_kept(share, layer).items()}
    kept = layer_saved(case_of(plan, layer, skew), SAVES[plan.target], share.again, _input_bytes(plan))
    kept = {name: size / share.unit for name, size in kept.items()}
    gone = _offloaded(plan)
    return {name: value * (1 - gone.get(name, 0.0)) for name, value in kept.items()}


def _input_bytes(plan: Plan) -> float:
    """Bytes of an element of a saved GEMM input."""
    if plan.low_precision:
        return FORMAT_BYTES.get(plan.knobs.precision, 1.0)
    return 4.0 if plan.knobs.precision == "fp32" else 2.0


def _offloaded(plan: Plan) -> dict[str, float]:
    """Fraction of each term that Megatron's activation offload moves to the host."""
    names = plan.knobs.activation_offload
    gone: dict[str, float] = {}
    if any(name in names for name in ("attn_norm", "mlp_norm")):
        gone["norms"] = 0.5
    if any(name in names for name in ("qkv_linear", "core_attn", "attn_proj")):
        gone["attention"] = 0.7
    if any(name in names for name in ("expert_fc1", "moe_act", "fused_group_mlp")):
        gone["experts"] = 0.9
        gone["dispatch"] = 0.9 if "fused_group_mlp" in names or "expert_fc1" in names else 0.0
    return gone


def _stages(plan: Plan) -> list[Held]:
    layout, layers = plan.layout, plan.model.layers
    v_shaped = layout.pipeline_schedule == "dualpipev"
    ranks: list[list[Chunk]] = [[] for _ in range(layout.pp)]
    for index, chunk in enumerate(plan.chunks):
        ranks[chunk_rank(index, layout.pp, v_shaped)].append(chunk)
    return [
        Held(
            chunks=tuple(chunks),
            layers=tuple(layers[i] for chunk in chunks for i in chunk.layers),
            embedding=any(chunk.embedding for chunk in chunks),
            mtp=sum(chunk.mtp for chunk in chunks),
            loss=any(chunk.loss for chunk in chunks),
        )
        for chunks in ranks
    ]


def stage_params(plan: Plan, held: Held) -> tuple[float, float]:
    """Parameters of a rank outside and inside the routed experts."""
    model, layout = plan.model, plan.layout
    depths = min(held.mtp, 1) if model.mtp_shared else held.mtp
    layers = [*held.layers, *(model.mtp_depth * depths)]
    dense = 0.0
    moe_layers = 0
    for layer in layers:
        split = mixer_params(model, layer) + (dense_params(model) if layer.ffn == "dense" else 0)
        whole = norm_params(model, layer)
        if layer.ffn == "moe":
            split += shared_params(model)
            whole += router_params(model)
            moe_layers += 1
        dense += split / layout.tp + whole
    table = padded_vocab(model, layout.tp) * model.dim / layout.tp
    dense += table * ((held.embedding or held.mtp > 0) + (held.loss or held.mtp > 0 if not model.tied else 0))
    dense += depths * 2 * model.dim**2 / layout.tp
    dense += model.dim if held.loss else 0
    if held.embedding and model.vision:
        dense += vision_params(model.vision, model.dim)
    experts = 0.0
    if model.moe:
        experts = moe_layers * model.moe.num_experts * expert_params(model) / layout.ep / layout.etp
    return dense, experts


def _stage(
    plan: Plan, stage: int, held: Held, saved: dict[Layer, dict[str, float]], skew: float, peaks: Peaks | None
) -> StageMemory:
    flights = in_flight(plan, stage)
    terms = _states(plan, held)
    if peaks and plan.knobs.ep_overlap and pairs_of(plan, stage):
        pair, size, moment = fullest(plan, stage, held.chunks, saved, skew)
        own_activations(plan, stage, held, saved, terms, pair.held)
        terms["logits" if moment.startswith("the loss") else "overlap"] = size
        terms["workspace"] = LIBRARIES if plan.chip.architecture != "cpu" else 0.0
    elif peaks:
        found = peaks.of(stage, held, terms["gradients"], flights)
        own_activations(plan, stage, held, saved, terms, found.turn.held, found.turn.back)
        moment = found.add_to(terms)
    else:
        _activations(plan, stage, held, saved, terms)
        moment = _transients(plan, held, saved, terms, skew)
    captured = _captured(plan, held, terms)
    peak = sum(terms.values())
    groups = sum(plan.layout.degree(axis) > 1 for axis in ("tp", "cp", "dp", "pp", "ep", "edp", "etp"))
    reserve = {
        "slack": SLACK * peak + captured,
        "context": CONTEXT_BYTES if plan.chip.architecture != "cpu" else 0.0,
        "communication": groups * GROUP_BUFFER_BYTES * 2 if plan.chip.architecture != "cpu" else 0.0,
    }
    return StageMemory(stage, peak, terms, moment, peak + sum(reserve.values()), reserve)


def _states(plan: Plan, held: Held) -> dict[str, float]:
    """Weights, gradients and optimizer states, sharded as the plan says."""
    layout, knobs = plan.layout, plan.knobs
    dense, experts = stage_params(plan, held)
    copies = layout.replicate
    dense_shards, expert_shards = max(1, layout.dp * layout.cp // copies), max(1, layout.edp // copies)
    states = dense / max(1, layout.dp * layout.cp) + experts / max(1, layout.edp)
    if knobs.data_parallel != "zero1":
        dense, experts = dense / dense_shards, experts / expert_shards
        states = dense + experts
    weight = 4 if knobs.precision == "fp32" else 2
    quantised = 0.0
    if plan.low_precision:
        # Both orientations of a scaled weight are kept; with fp8_params they are the weight itself.
        quantised = 2 * _input_bytes(plan) * (dense * 0.8 + experts)
    weights = weight * (dense + experts)
    if plan.low_precision and knobs.fp8_params:
        weights = weight * dense * 0.2
    master = 4 if knobs.precision != "fp32" and knobs.master_weights else 0
    moments = 1 if plan.job.optimizer == "muon" else 2  # of the vocabulary's tables Muon keeps two as well
    per_param = (master + moments * STATE_BYTES[knobs.optimizer_dtype]) * (1 - knobs.optimizer_offload)
    trained = 0.0 if "language" in plan.job.freeze else 1.0
    return {
        "weights": weights,
        "gradients": STATE_BYTES[knobs.grad_dtype] * (dense + experts) * trained,
        "optimizer": per_param * states * trained,
        "quantised_weights": quantised,
    } | (_own_states(plan, held) if plan.target == OWN else {})


def _own_states(plan: Plan, held: Held) -> dict[str, float]:
    dense, experts = stage_params(plan, held)
    dense = own_dense(plan, held, dense)
    tables = num_tables(plan, held) * plan.model.vocab / plan.layout.tp * plan.model.dim
    states = own_states(plan, dense, experts, shared_table(plan, held), tables)
    return {**states, "quantised_weights": own_narrow(plan, held, experts)}


def in_flight(plan: Plan, stage: int) -> list[int]:
    """Microbatches whose activations each chunk of a rank holds at the fullest moment, in order of chunks."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    merged = 1 if plan.knobs.ep_overlap and layout.pp > 1 else 0
    if layout.pp == 1:
        return [1]
    if layout.pipeline_schedule == "interleaved":
        warm = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1 + merged
        rounds, rest = divmod(warm, layout.chunks)  # chunks take turns, PP microbatches at a time
        held = (rounds * layout.pp + min(max(rest - c * layout.pp, 0), layout.pp) for c in range(layout.vpp))
        return [min(count, each) for each in held]
    if layout.pipeline_schedule == "dualpipev":
        return [min(count, 2 * layout.pp - stage), min(count, stage + 1)]
    chunks = max(1, layout.vpp)
    return [min(count, layout.pp - stage + (layout.pp if layout.schedule == "zero-bubble" else 0) // 2)] * chunks


def _activations(
    plan: Plan, stage: int, held: Held, saved: dict[Layer, dict[str, float]], terms: dict[str, float]
) -> None:
    keep = 1.0
    if plan.knobs.activation_offload_layers and held.layers:
        keep = max(0.0, 1 - plan.knobs.activation_offload_layers / len(held.layers))
    tokens = plan.job.micro_batch * plan.job.seq_len / plan.layout.cp
    vocab = padded_vocab(plan.model, plan.layout.tp) / plan.layout.tp
    for chunk, count in zip(held.chunks, in_flight(plan, stage), strict=False):
        for layer in chunk_layers(plan, chunk):
            for name, value in saved[layer].items():
                terms[name] = terms.get(name, 0.0) + value * count * keep
        if chunk.embedding:
            terms["embedding"] = terms.get("embedding", 0.0) + BF16 * plan.model.dim * tokens / plan.layout.tp
        if chunk.loss or chunk.mtp:
            heads = chunk.loss + chunk.mtp
            terms["logits"] = terms.get("logits", 0.0) + heads * BF16 * vocab * tokens
    if held.loss and not plan.knobs.loss_fusion:  # one head at a time is widened to fp32
        terms["logits"] = terms.get("logits", 0.0) + 6 * vocab * tokens
    if held.embedding and plan.model.vision:
        images = 1.0 if plan.job.images is None else plan.job.images
        patches = images * plan.job.micro_batch * IMAGE_PATCHES
        terms["vision"] = vision_saved(plan.model.vision, patches, "vision" in plan.job.freeze)


def _transients(
    plan: Plan, held: Held, saved: dict[Layer, dict[str, float]], terms: dict[str, float], skew: float
) -> str:
    """What lives only for a moment: the layer being recomputed, gradients of a layer, overlap, graphs."""
    knobs = plan.knobs
    layers = {layer for chunk in held.chunks for layer in chunk_layers(plan, chunk)}
    moment = "the first backward, all forwards done"
    if knobs.recompute and layers:
        unit = Share(plan).unit
        again = max(unit * _whole_layer(plan, layer, skew) - sum(saved[layer].values()) for layer in layers)
        if again > 0:
            terms["recompute"] = again
            moment = "the first backward, while its layer is recomputed"
    if knobs.ep_overlap and held.layers:
        terms["overlap"] = max(sum(saved[layer].values()) for layer in layers)
    if knobs.graphs and plan.chip.architecture != "cpu":
        one = max((sum(saved[layer].values()) for layer in layers), default=0.0)
        terms["graphs"] = 0.1 * one * len(knobs.graphs)  # static inputs and outputs
    terms["workspace"] = _dispatch_workspace(plan, held) + _gathered(plan, held)
    terms["workspace"] += WORKSPACE_BYTES if plan.chip.architecture != "cpu" else 0.0
    return moment


def _gathered(plan: Plan, held: Held) -> float:
    """FSDP holds the layer at work and the next one whole."""
    if plan.knobs.data_parallel == "zero1" or not held.layers:
        return 0.0
    dense, experts = stage_params(plan, held)
    return 2 * BF16 * (dense + experts) / len(held.layers)


def _dispatch_workspace(plan: Plan, held: Held) -> float:
    """What one exchange holds while it runs: rows sent and received; flex dispatchers keep one buffer of tokens."""
    moe, layout = plan.model.moe, plan.layout
    if moe is None or layout.ep * layout.etp == 1 or not any(layer.ffn == "moe" for layer in held.layers):
        return 0.0
    tokens = plan.job.micro_batch * plan.job.seq_len / layout.cp / layout.tp
    token = BF16 * (moe.latent_dim or plan.model.dim)
    copies = 2 * moe.top_k if plan.knobs.dispatcher == "alltoall" else min(moe.top_k, layout.ep)
    return tokens * token * copies


def _captured(plan: Plan, held: Held, terms: dict[str, float]) -> float:
    """Bytes that a captured mixer keeps in the graph's own pool, where the allocator's peak does not see them."""
    scopes = {"mamba": "mamba", "attn": "attention"}
    caught = {mixer for scope, mixer in scopes.items() if scope in plan.knobs.graphs}
    mixers = [layer.mixer for layer in held.layers if layer.mixer != "none"]
    if plan.chip.architecture == "cpu" or not caught or not mixers or plan.target != "megatron-bridge":
        return 0.0
    inside = sum(mixer in caught or (mixer in ("window", "delta") and "attention" in caught) for mixer in mixers)
    moved = terms.get("attention", 0.0) * inside / len(mixers)
    terms["attention"] = terms.get("attention", 0.0) - moved
    return moved


def _whole_layer(plan: Plan, layer: Layer, skew: float) -> float:
    return sum(layer_saved(case_of(plan, layer, skew), SAVES[plan.target], frozenset(), _input_bytes(plan)).values())
