"""The memory model of Megatron Bridge: states, activations of microbatches in flight, and tensors of the peak's moment.

`memory/by_stack.py` uses it for plans with `target = "megatron-bridge"`. The peak is taken at the first backward, when
all forwards of the warm-up are done; published runs calibrate the constants (`docs/reference/estimate.md`).
"""

from collections.abc import Iterator

from threefold.cost.layer_work import BF16, IMAGE_PATCHES, layer_case
from threefold.cost.memory.megatron.activations import layer_activations, vision_activations
from threefold.cost.memory.megatron.states import gemm_input_bytes, state_terms
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
from threefold.spec.model import Layer
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
            pool_bytes = _move_to_graph_pool(plan, contents, terms)
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


def _move_to_graph_pool(plan: Plan, contents: StageContents, terms: Terms) -> float:
    """Take the activations of captured mixers out of `terms` and return them: they lie in the graph's own pool, which
    the allocator's peak does not count."""
    scopes = {"mamba": "mamba", "attn": "attention"}
    captured = {mixer for scope, mixer in scopes.items() if scope in plan.knobs.graphs}
    mixers = [layer.mixer for layer in contents.layers if layer.mixer != "none"]
    if plan.chip.architecture == "cpu" or not captured or not mixers:
        return 0.0
    inside = sum(mixer in captured or (mixer in ("window", "delta") and "attention" in captured) for mixer in mixers)
    moved = terms.get("attention", 0.0) * inside / len(mixers)
    terms["attention"] = terms.get("attention", 0.0) - moved
    return moved
