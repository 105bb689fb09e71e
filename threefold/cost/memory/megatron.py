"""The memory model of Megatron Bridge: states, activations of microbatches in flight, and tensors of the peak's moment.

`memory/by_stack.py` uses it for plans with `target = "megatron-bridge"`. The peak is taken at the first backward, when
all forwards of the warm-up are done, or in the optimizer's step; published runs calibrate the constants
(`docs/reference/estimate.md`).
"""

from collections.abc import Iterator
from functools import lru_cache

from threefold.cost.format_support import STATE_BYTES, master_weight_bytes, offloads_masters
from threefold.cost.layer_work import BF16, IMAGE_PATCHES, LayerCase, layer_case
from threefold.cost.memory.stage_memory import StagePeak, Terms, fraction_on_device, in_flight, layer_kinds
from threefold.cost.rank_params import stage_params
from threefold.cost.stage_contents import (
    NotRecomputedLayer,
    StageContents,
    chunk_layers,
    layers_per_recompute,
    stage_contents,
)
from threefold.plan.plan import Plan
from threefold.spec.flops import padded_vocab
from threefold.spec.model import GqaSpec, Layer, MlaSpec, ModelSpec, VisionSpec
from threefold.units import MIB

WORKSPACE_BYTES = 192 * MIB  # GEMM workspaces


class MegatronMemory:
    """Implements `MemoryModel` for Megatron Bridge."""

    def layer_activation_bytes(self, plan: Plan, layer: Layer, skew: float) -> Terms:
        is_recomputed = not isinstance(layer, NotRecomputedLayer)
        recompute = frozenset(plan.knobs.recompute) if is_recomputed else frozenset[str]()
        saved = layer_activations(layer_case(plan, layer, skew), recompute, gemm_input_bytes(plan))
        unit = layers_per_recompute(plan) if is_recomputed else 1
        saved = {name: size / unit for name, size in saved.items()}
        offloaded = _offloaded_fractions(plan)
        return {name: value * (1 - offloaded.get(name, 0.0)) for name, value in saved.items()}

    def stage_peaks(self, plan: Plan, skew: float) -> Iterator[StagePeak]:
        saved = {layer: self.layer_activation_bytes(plan, layer, skew) for layer in layer_kinds(plan)}
        for stage, contents in enumerate(stage_contents(plan)):
            terms = state_terms(plan, contents)
            _add_activations(plan, stage, contents, saved, terms)
            moment = _add_transients(plan, contents, saved, terms, skew)
            pool_bytes = _move_to_graph_pool(plan, contents, saved, terms)
            step = state_terms(plan, contents) | {"workspace": _optimizer_transients(plan, contents)}
            if sum(step.values()) > sum(terms.values()):
                terms, moment = step, "the optimizer's step"
            yield StagePeak(terms, moment, pool_bytes)


def _offloaded_fractions(plan: Plan) -> dict[str, float]:
    """The fraction of each term that Megatron's activation offload moves to the host."""
    names = plan.knobs.activation_offload
    fractions: dict[str, float] = {}
    if any(name in names for name in ("attn_norm", "mlp_norm")):
        fractions["norms"] = 0.5
    if any(name in names for name in ("qkv_linear", "core_attn", "attn_proj")):
        fractions["attention"] = 0.7
    if any(name in names for name in ("expert_fc1", "moe_act", "fused_group_mlp")):
        fractions["experts"] = 0.9
        fractions["dispatch"] = 0.9 if "fused_group_mlp" in names or "expert_fc1" in names else 0.0
    return fractions


def _add_activations(plan: Plan, stage: int, contents: StageContents, saved: dict[Layer, Terms], terms: Terms) -> None:
    """Add the activations of every microbatch in flight, of the embedding, the logits and the image encoder."""
    on_device = fraction_on_device(plan, contents)
    tokens = plan.job.micro_batch * plan.job.seq_len / plan.layout.cp
    vocab = padded_vocab(plan.model, plan.layout.tp) / plan.layout.tp
    for chunk, count in zip(contents.chunks, in_flight(plan, stage), strict=False):
        for layer in chunk_layers(plan, chunk):
            for name, value in saved[layer].items():
                terms[name] = terms.get(name, 0.0) + value * count * on_device
        if chunk.embedding:
            terms["embedding"] = terms.get("embedding", 0.0) + BF16 * plan.model.dim * tokens / plan.layout.tp
        if chunk.loss or chunk.mtp:
            num_heads = chunk.loss + chunk.mtp
            terms["logits"] = terms.get("logits", 0.0) + num_heads * BF16 * vocab * tokens
    if contents.loss and not plan.knobs.loss_fusion:  # the logits of one output layer at a time are cast to fp32
        terms["logits"] = terms.get("logits", 0.0) + 6 * vocab * tokens
    if contents.embedding and plan.model.vision:
        images = 1.0 if plan.job.images is None else plan.job.images
        patches = images * plan.job.micro_batch * IMAGE_PATCHES
        terms["vision"] = vision_activations(plan.model.vision, patches, "vision" in plan.job.freeze)


def _add_transients(plan: Plan, contents: StageContents, saved: dict[Layer, Terms], terms: Terms, skew: float) -> str:
    """Add tensors that live only around the peak (the recomputed layer, overlap, graphs, workspaces); name its
    moment."""
    knobs = plan.knobs
    layers = {layer for chunk in contents.chunks for layer in chunk_layers(plan, chunk)}
    moment = "the first backward, all forwards done"
    if knobs.recompute and layers:
        unit = layers_per_recompute(plan)
        recomputed = max(unit * _without_recompute(plan, layer, skew) - sum(saved[layer].values()) for layer in layers)
        if recomputed > 0:
            terms["recompute"] = recomputed
            moment = "the first backward, while its layer is recomputed"
    if knobs.ep_overlap and contents.layers:
        terms["overlap"] = max(sum(saved[layer].values()) for layer in layers)
    if knobs.graphs and plan.chip.architecture != "cpu":
        largest = max((sum(saved[layer].values()) for layer in layers), default=0.0)
        terms["graphs"] = 0.1 * largest * len(knobs.graphs)  # static inputs and outputs
    terms["workspace"] = _dispatch_workspace(plan, contents) + _gathered_weights(plan, contents)
    terms["workspace"] += WORKSPACE_BYTES if plan.chip.architecture != "cpu" else 0.0
    return moment


def _without_recompute(plan: Plan, layer: Layer, skew: float) -> float:
    """Bytes that a layer would save if nothing of it were recomputed."""
    return sum(layer_activations(layer_case(plan, layer, skew), frozenset(), gemm_input_bytes(plan)).values())


def _gathered_weights(plan: Plan, contents: StageContents) -> float:
    """Under FSDP the weights of the current layer and of the next one are gathered."""
    if plan.knobs.data_parallel == "zero1" or not contents.layers:
        return 0.0
    dense, experts = stage_params(plan, contents)
    return 2 * BF16 * (dense + experts) / len(contents.layers)


def _dispatch_workspace(plan: Plan, contents: StageContents) -> float:
    """Rows sent and received by one exchange; the flex dispatchers have one buffer of tokens instead."""
    moe, layout = plan.model.moe, plan.layout
    if moe is None or layout.ep * layout.etp == 1 or not any(layer.ffn == "moe" for layer in contents.layers):
        return 0.0
    tokens = plan.job.micro_batch * plan.job.seq_len / layout.cp / layout.tp
    token_bytes = BF16 * (moe.latent_dim or plan.model.dim)
    copies = 2 * moe.top_k if plan.knobs.dispatcher == "alltoall" else min(moe.top_k, layout.ep)
    return tokens * token_bytes * copies


def _move_to_graph_pool(plan: Plan, contents: StageContents, saved: dict[Layer, Terms], terms: Terms) -> float:
    """Take the activations of captured mixers and of the norms before them out of `terms` and return them: they lie in
    the graph's own pool, which the allocator's peak does not count."""
    scopes = {"mamba": "mamba", "attn": "attention"}
    captured = {mixer for scope, mixer in scopes.items() if scope in plan.knobs.graphs}
    captured |= {"window", "delta"} if "attention" in captured else set()
    mixers = [layer.mixer for layer in contents.layers if layer.mixer != "none"]
    if plan.chip.architecture == "cpu" or not captured or not mixers:
        return 0.0
    inside = [layer for layer in contents.layers if layer.mixer in captured]
    recomputes_norms, input_bytes = "layernorm" in plan.knobs.recompute, gemm_input_bytes(plan)
    norms = sum(_mixer_norm(plan.model, layer, recomputes_norms, input_bytes) for layer in inside)
    norms *= plan.job.micro_batch * plan.job.seq_len / plan.layout.cp / plan.layout.tp
    # Layers that are offloaded whole save nothing here.
    all_norms = sum(saved[layer].get("norms", 0.0) for layer in contents.layers if layer in saved)
    moved = {
        "attention": terms.get("attention", 0.0) * len(inside) / len(mixers),
        "norms": terms.get("norms", 0.0) * min(1.0, norms / all_norms) if all_norms else 0.0,
    }
    for name, size in moved.items():
        terms[name] = terms.get(name, 0.0) - size
    return sum(moved.values())


FP32 = 4
ROUTER_VALUES = 4.0  # fp32 values that the router saves per token and expert


@lru_cache(maxsize=65536)
def layer_activations(case: LayerCase, recompute: frozenset[str], input_bytes: float) -> Terms:
    """Bytes that one layer saves, where the modules named in `recompute` are recomputed."""
    model, layer = case.model, case.layer
    tokens = case.tokens / case.tp
    if "full" in recompute:
        return {"norms": BF16 * model.dim * tokens}
    recomputes_norms = "layernorm" in recompute
    norms = _mixer_norm(model, layer, recomputes_norms, input_bytes)
    if layer.ffn != "none":
        norms += _norm(model, recomputes_norms and layer.ffn == "moe", input_bytes)
    saved = {"norms": norms * tokens}
    saved["attention"] = _mixer(model, layer, recompute, input_bytes) * tokens
    if layer.ffn == "dense":
        saved["mlp"] = 0.0 if "mlp" in recompute else _mlp(model, model.dense_dim, input_bytes, False) * tokens
    elif layer.ffn == "moe":
        saved |= _moe(case, recompute, input_bytes, tokens)
    return saved


def _mixer_norm(model: ModelSpec, layer: Layer, recomputes_norms: bool, input_bytes: float) -> float:
    """Bytes that the norm before the mixer saves. Megatron recomputes norms that are modules of their own, before an
    MoE layer and before MLA; others are a part of the linear layer that follows."""
    if layer.mixer == "none":
        return 0.0
    is_module = layer.mixer == "attention" and isinstance(model.attention, MlaSpec)
    return _norm(model, recomputes_norms and is_module, input_bytes)


def _norm(model: ModelSpec, recomputed: bool, input_bytes: float) -> float:
    """The input of a norm (the residual stream) and its output, which the next GEMM saves."""
    return model.dim * (BF16 + (0 if recomputed else input_bytes))


def _mixer(model: ModelSpec, layer: Layer, recompute: frozenset[str], input_bytes: float) -> float:
    """What the mixer saves: attention (GQA or MLA), the gated delta rule, or Mamba."""
    spec = model.attention_of(layer)
    if layer.mixer == "mamba" and model.mamba:
        m = model.mamba
        channels = m.inner_dim + 2 * m.num_groups * m.state_dim
        # Projection output, convolution output, gated output, normed output; states between chunks of 128.
        states = m.num_heads * m.head_dim * m.state_dim * FP32 / 128
        outputs = BF16 * (m.inner_dim + channels + m.num_heads + channels + m.inner_dim)
        return outputs + input_bytes * m.inner_dim + states
    if layer.mixer == "delta" and model.delta:
        d = model.delta
        channels = 2 * d.keys + d.values
        states = d.num_v_heads * d.k_dim * d.v_dim * FP32 / 64
        norm_out = 0 if "gdn_norm_out" in recompute else input_bytes * d.values + BF16 * d.values
        return BF16 * (2 * channels + d.values + 4 * d.num_v_heads) + norm_out + states
    if spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return _mla(spec, recompute, input_bytes)
    assert isinstance(spec, GqaSpec)
    gate = spec.q_dim if spec.gated else 0
    qkv = BF16 * (spec.q_dim + 2 * spec.kv_dim)
    before_norm = BF16 * (spec.q_dim + spec.kv_dim) if spec.qk_norm else 0
    return qkv + before_norm + BF16 * 2 * gate + input_bytes * spec.q_dim + FP32 * spec.num_heads


def _mla(spec: MlaSpec, recompute: frozenset[str], input_bytes: float) -> float:
    latents = BF16 * (2 * (spec.q_rank or 0) + 2 * spec.kv_rank + spec.rope_dim)
    heads = spec.num_heads
    up_proj = 0.0
    if "mla_up_proj" not in recompute:
        # Queries before and after rotation, keys joined with their rotary part, values.
        up_proj = BF16 * heads * (2 * spec.qk_dim + spec.qk_dim + spec.nope_dim + 2 * spec.v_dim)
    return latents + up_proj + input_bytes * heads * spec.v_dim + FP32 * heads


def _mlp(model: ModelSpec, hidden: int, input_bytes: float, recomputes_act: bool) -> float:
    """FC1's output and, unless the activation is recomputed, the input of FC2."""
    num_fc1 = 2 if model.glu else 1
    return BF16 * num_fc1 * hidden + (0 if recomputes_act else input_bytes * hidden)


def _moe(case: LayerCase, recompute: frozenset[str], input_bytes: float, tokens: float) -> Terms:
    """Bytes of all tokens: router, permuted input of the experts, the experts, shared experts."""
    model, moe = case.model, case.model.moe
    assert moe is not None
    router = FP32 * ROUTER_VALUES * moe.num_experts * tokens
    if "moe" in recompute:
        return {"router": 0.0, "dispatch": 0.0, "experts": 0.0, "shared_experts": 0.0}
    rows = tokens * moe.top_k * case.capacity
    dispatch = input_bytes * (moe.latent_dim or model.dim) * rows
    experts = _mlp(model, moe.expert_dim, input_bytes, "moe_act" in recompute) * rows
    shared = 0.0
    if moe.shared_width and "shared_experts" not in recompute:
        shared = _mlp(model, moe.shared_width, input_bytes, False) * tokens
    return {"router": router, "dispatch": dispatch, "experts": experts, "shared_experts": shared}


def vision_activations(vision: VisionSpec, patches: float, frozen: bool) -> float:
    """Bytes that the image encoder saves for all patches; a frozen encoder saves nothing."""
    if frozen:
        return 0.0
    per_patch = BF16 * (2 * 2 * vision.dim + 4 * vision.dim + 2 * vision.mlp_dim) + FP32 * vision.num_heads
    return patches * vision.depth * per_patch


# Bytes of an element in the GEMM format, block scales included.
FORMAT_BYTES = {"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "fp8-blockwise": 1 + 4 / 128}


def gemm_input_bytes(plan: Plan) -> float:
    """Bytes of an element of a GEMM input, as it is saved for the backward."""
    if plan.low_precision:
        return FORMAT_BYTES.get(plan.knobs.precision, 1.0)
    return 4.0 if plan.knobs.precision == "fp32" else 2.0


def state_terms(plan: Plan, contents: StageContents) -> Terms:
    """Bytes of the states of one rank, sharded as the plan says."""
    layout, knobs = plan.layout, plan.knobs
    dense, experts = stage_params(plan, contents)
    optimized = sum(_optimized_params(plan, dense, experts))
    if knobs.data_parallel != "zero1":
        copies = layout.replicate
        dense, experts = dense / max(1, layout.dp * layout.cp // copies), experts / max(1, layout.edp // copies)
    weight = 4 if knobs.precision == "fp32" else 2
    quantized = 0.0
    if plan.low_precision:
        # Both orientations of a scaled weight are kept; with fp8_params they are the weight itself.
        quantized = 2 * gemm_input_bytes(plan) * (dense * 0.8 + experts)
    weights = weight * (dense + experts)
    if plan.low_precision and knobs.fp8_params:
        weights = weight * dense * 0.2
    master = master_weight_bytes(plan)
    moments = 1 if plan.job.optimizer == "muon" else 2  # for embedding and head Muon too has two
    per_param = float(master + moments * STATE_BYTES[knobs.optimizer_dtype])
    per_param -= knobs.optimizer_offload * (per_param if offloads_masters(plan) else per_param - master)
    trained = 0.0 if "language" in plan.job.freeze else 1.0
    return {
        "weights": weights,
        "gradients": STATE_BYTES[knobs.grad_dtype] * (dense + experts) * trained,
        "optimizer": per_param * optimized * trained,
        "quantized_weights": quantized,
    }


def _optimized_params(plan: Plan, dense: float, experts: float) -> tuple[float, float]:
    """Parameters that a rank updates, of so many that a stage holds outside and inside its experts."""
    layout = plan.layout
    copies = layout.replicate if plan.knobs.data_parallel != "zero1" else 1
    return dense / max(1, layout.dp * layout.cp // copies), experts / max(1, layout.edp // copies)


def _optimizer_transients(plan: Plan, contents: StageContents) -> float:
    """Bytes of the optimizer's step on top of the states. Transformer Engine's Adam copies moments that are not in fp32
    to fp32, all those of a parameter group at once (its `FusedAdam.step`); experts are a group of their own."""
    knobs = plan.knobs
    if plan.job.optimizer != "adamw" or knobs.optimizer_dtype == "fp32" or "language" in plan.job.freeze:
        return 0.0
    group = max(_optimized_params(plan, *stage_params(plan, contents)))
    return 2 * STATE_BYTES["fp32"] * group * (1 - knobs.optimizer_offload)
