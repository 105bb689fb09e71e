"""Tensors held for delayed weight gradients (zero-bubble schedules, `delay_wgrad`) in our own engine.

A GEMM whose weight gradient is delayed keeps its input and the gradient of its output (the engine's delayed-wgrad
code); everything else of the layer is freed. Recompute changes nothing, because what it makes again is what is kept.
`peak.py` uses this for zero-bubble schedules, `overlap_peak.py` for EP overlap.

Mirrors `engine/autograd/delayed_wgrad.py`, `engine/autograd/linear.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from threefold.cost.memory.threefold.local_sizes import FP32, SCALE_ROWS, LocalSizes, for_layer
from threefold.cost.memory.threefold.timelines.moe_backward import moe_backward_steps
from threefold.cost.stage_contents import chunk_layers, first_gradient_in
from threefold.cost.trained_weights import is_partly_frozen, trained_share
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, Layer, MlaSpec


def splits_backward(plan: Plan) -> bool:
    """Whether the schedule runs weight gradients as passes of their own. FSDP frees gathered weights before that, so
    its weight gradients are not delayed."""
    return plan.layout.pipeline_schedule == "zero-bubble" and plan.knobs.data_parallel == "zero1"


def splits_some_backwards(plan: Plan) -> bool:
    """Whether the schedule does so for some microbatches only, where it fills and drains: DualPipeV."""
    return plan.layout.pipeline_schedule == "dualpipev" and plan.knobs.data_parallel == "zero1"


@dataclass(frozen=True, slots=True)
class WgradBytes:
    """Bytes that one layer keeps for its delayed weight gradients, for one microbatch."""

    mixer: float = 0.0
    experts: float = 0.0
    dense: float = 0.0  # the dense MLP or the shared experts

    @property
    def ffn(self) -> float:
        return self.experts + self.dense

    @property
    def total(self) -> float:
        return self.mixer + self.ffn


NO_WGRAD = WgradBytes()


def delayed_wgrad_bytes(local: LocalSizes, layer: Layer) -> WgradBytes:
    """What one layer keeps for its weight gradients, for one microbatch. Frozen weights keep nothing."""
    local = for_layer(local, layer)
    if first_gradient_in(layer) == "none":
        return NO_WGRAD
    every = _wgrad_bytes(local, layer)
    if not is_partly_frozen(local.plan):
        return every
    # A module with frozen weights keeps a part: as much as its trained weights are of all its weights.
    mixer, experts = trained_share(local.plan, "mixer"), trained_share(local.plan, "experts")
    dense = trained_share(local.plan, "mlp" if layer.ffn == "dense" else "shared_experts")
    of_experts = every.experts * experts
    if local.expert_adapter_copies and local.model.moe is not None and layer.ffn == "moe":
        # Adapters of experts delay theirs too, and keep the inputs and gradients of the GEMMs beside them unquantized.
        hidden = local.model.moe.expert_dim / local.plan.layout.etp * (1 + local.num_fc1)
        of_experts = local.element_bytes * (2 * local.model.dim + hidden) * local.expert_rows
    return WgradBytes(every.mixer * mixer, of_experts, every.dense * dense)


def _wgrad_bytes(local: LocalSizes, layer: Layer) -> WgradBytes:
    model, moe, low = local.model, local.model.moe, local.quantized_bytes
    input_tokens = local.gathered_tokens if local.gathers_sequence else local.tokens
    mixer = _mixer(local, layer)
    if layer.ffn == "dense":
        hidden = model.dense_dim / local.tp * local.gathered_tokens
        from_norm = "layernorm" in local.recompute and not local.recompute & {"mlp", "full"}
        dense = _gated_mlp(local, hidden, input_tokens, recomputes_input=from_norm)
        return WgradBytes(mixer, dense=0.0 if local.overlaps_tp else dense)
    if layer.ffn != "moe" or moe is None:
        return WgradBytes(mixer)
    expert_dim, shared = moe.expert_dim / local.plan.layout.etp, 0.0
    rows = local.tokens if local.experts_read_in_place else local.expert_rows
    recomputes_act = "moe_act" in local.recompute and "moe" not in local.recompute
    experts = _gated_mlp(local, expert_dim * local.expert_rows, rows, recomputes_act)
    if low and local.uses_fused_experts:  # gradients too are quantized along columns, in blocks of 128 rows
        per_row = low * (model.dim + expert_dim) + _grad_bytes(local) * (model.dim + 2 * expert_dim)
        experts = per_row * local.padded_expert_rows
    if moe.shared_width and not local.overlaps_tp:
        shared = _gated_mlp(local, moe.shared_width / local.tp * local.gathered_tokens, input_tokens)
        gate_input = moe.shared_gate and local.gathers_sequence
        shared += local.gemm_input_bytes * model.dim * local.tokens if gate_input else 0.0
    return WgradBytes(mixer, experts, shared)


def _gated_mlp(
    local: LocalSizes, hidden: float, tokens: float, recomputes_act: bool = False, recomputes_input: bool = False
) -> float:
    """Inputs of the GEMMs, of which gate and up share theirs, and the gradients of their outputs. An input that is
    recomputed is kept unquantized."""
    ends = local.model.dim * tokens
    hidden_bytes = local.element_bytes if recomputes_act else local.gemm_input_bytes
    input_bytes = local.element_bytes if recomputes_input else local.gemm_input_bytes
    return input_bytes * ends + hidden_bytes * hidden + _grad_bytes(local) * (local.num_fc1 * hidden + ends)


def _grad_bytes(local: LocalSizes) -> float:
    """Bytes of an element of an output's gradient; in low precision it has a scale for each block of a row."""
    return local.quantized_bytes + FP32 / SCALE_ROWS if local.quantized_bytes else local.element_bytes


def chunk_wgrad_bytes(local: LocalSizes, chunk: Chunk, by_layer: Mapping[Layer, WgradBytes]) -> float:
    """What a chunk keeps for one microbatch, from the bytes of each kind of layer."""
    layers = chunk_layers(local.plan, chunk)
    return sum(by_layer[layer].total for layer in layers) + mtp_projection_bytes(local, chunk)


def mtp_projection_bytes(local: LocalSizes, chunk: Chunk) -> float:
    """What the projections of a chunk's MTP depths keep, never quantized. They read two hidden states of a token."""
    return 3 * local.element_bytes * local.model.dim * local.tokens * chunk.mtp


def _mixer(local: LocalSizes, layer: Layer) -> float:
    """The input of the first GEMMs and the gradients of their outputs; the same for the output projection, which reads
    the attention kernel's output as the kernel saved it."""
    model, s, t, dim = local.model, local.gathered_tokens, local.tokens, local.model.dim
    i, b, g = local.gemm_input_bytes, local.element_bytes, _grad_bytes(local)
    from_norm = b if "layernorm" in local.recompute else i  # a recomputed input is kept unquantized
    spec = model.attention_of(layer)
    if local.overlaps_tp and not (layer.mixer == "attention" and isinstance(spec, MlaSpec)):
        return 0.0
    if layer.mixer == "delta" and model.delta:
        values = model.delta.values / local.tp
        projected = 2 * (model.delta.keys + model.delta.num_v_heads) / local.tp + 2 * values
        return (from_norm * dim + i * values + g * (projected + dim)) * s
    if layer.mixer == "mamba" and model.mamba:
        inner, projected = model.mamba.inner_dim / local.tp, model.mamba.projected_dim / local.tp
        return (from_norm * dim + i * inner + g * (projected + dim)) * s
    if spec is None:
        return 0.0
    if isinstance(spec, GqaSpec):
        q, kv = spec.q_dim / local.tp, max(1.0, spec.num_kv_heads / local.tp) * spec.head_dim
        output_bytes = i if spec.gated or not local.has_fused_kernels else b
        return (from_norm * dim + output_bytes * q + g * ((2 if spec.gated else 1) * q + 2 * kv + dim)) * s
    assert isinstance(spec, MlaSpec)
    q_rank, heads, gathers = spec.q_rank or 0, spec.num_heads / local.tp, local.gathers_sequence
    latents = q_rank + spec.kv_rank + (spec.rope_dim if gathers else 0)
    if not q_rank and (gathers or local.quantized_bytes):  # the norm's output, gathered or quantized once more
        latents += dim
    up = i * latents + g * heads * (spec.qk_dim + spec.nope_dim + spec.v_dim)
    if local.plan.exchanges_latents:  # weight gradients of up projections are made with the gradients of latents
        up = 0.0
    down = from_norm * dim + g * (q_rank + spec.kv_rank + spec.rope_dim)
    out = 0.0 if local.overlaps_tp else b * heads * spec.v_dim + g * dim
    return (up + out) * s + down * t


def output_projection_bytes(local: LocalSizes, layer: Layer) -> float:
    """What the output projection keeps beside tensors that attention's backward needs anyhow: the gathered or quantized
    gradient of its output and, over context-parallel ranks, its own copy of attention's output."""
    spec = local.model.attention_of(layer)
    if spec is None or local.overlaps_tp:
        return 0.0
    values = spec.num_heads * (spec.v_dim if isinstance(spec, MlaSpec) else spec.head_dim) / local.tp
    is_apart = local.gathers_sequence or bool(local.quantized_bytes)
    has_copy = local.plan.layout.cp > 1 and not (isinstance(spec, MlaSpec) and local.plan.exchanges_latents)
    gradient = _grad_bytes(local) * local.model.dim if is_apart else 0.0
    return (gradient + (local.element_bytes * values if has_copy else 0.0)) * local.gathered_tokens


def wgrad_transients(local: LocalSizes, layer: Layer) -> float:
    """Bytes on top of the kept tensors while a layer's weight gradients are made: FC2's gradients, or also FC1's when
    what FC2's were made of is freed."""
    model, moe, layout = local.model, local.model.moe, local.plan.layout
    if layer.ffn != "moe" or moe is None:
        return local.element_bytes * model.dense_dim / local.tp * model.dim if layer.ffn == "dense" else 0.0
    expert_dim = moe.expert_dim / layout.etp
    fc2_grads = local.element_bytes * expert_dim * model.dim * moe.num_experts / layout.ep
    if local.quantized_bytes and not local.uses_fused_experts:  # one gradient per expert, then all of them stacked
        return 4 * fc2_grads
    rows = local.tokens if local.experts_read_in_place else local.expert_rows
    freed = local.element_bytes * (model.dim * rows + expert_dim * local.expert_rows)
    return max(fc2_grads, local.num_fc1 * fc2_grads - freed)


def dgrad_transients(local: LocalSizes, layer: Layer) -> float:
    """The most bytes in a feed-forward backward that makes no weight gradients: as `ffn_backward_transients`, but the
    input of the last GEMM and the gradient of its output stay."""
    b, model = local.element_bytes, local.model
    if layer.ffn == "moe":
        return max(moe_backward_steps(local, delays_wgrad=True).values())
    fraction = local.mlp_chunk_fraction if local.recompute & {"mlp", "full"} else 1
    act_grad = b * model.dense_dim / local.tp * local.gathered_tokens * fraction
    most = b * model.dim * local.gathered_tokens + (3 if local.has_fused_kernels else 2) * act_grad
    if local.quantized_bytes:
        # Gate and up have their backward one by one: gradients of the input, and their sum. Those of outputs stay.
        kept = _grad_bytes(local) * (model.dim * local.gathered_tokens * fraction + 2 * act_grad / b)
        inputs = 3 * b * model.dim * local.gathered_tokens * fraction
        most = max(most, b * model.dim * local.tokens + inputs + kept)
    return most
