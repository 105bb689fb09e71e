"""Bytes of activations that our own engine saves from forward to backward, per layer.

They are given by memory term and counted from the code of `engine/`, tensor by tensor. Rehearsals run that code and
check these numbers against it. `layer_activations` is for one layer and one microbatch; `model.py` sums
over layers and microbatches in flight.

Mirrors `engine/models/decoder.py`, `engine/models/activation_memory.py`, `engine/attention/gqa.py`,
`engine/attention/mla.py`, `engine/attention/sparse/sparse_mla.py`, `engine/attention/sparse/chosen_keys.py`,
`engine/layers/mlp.py`, `engine/layers/input_linears.py`, `engine/moe/layer.py`, `engine/moe/router.py`,
`engine/moe/experts.py`, `engine/lora.py`, `engine/precision/low_precision_linear.py`,
`engine/kernels/experts/fused_experts.py`, `engine/kernels/fp8/fused_experts.py`, `engine/models/block.py`,
`engine/attention/sparse/compressed.py`.
"""

from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.local_sizes import FP32, INT64, LocalSizes, is_sparse
from threefold.cost.memory.threefold.timelines.grouped_heads import attention_of, gqa_group, saved_output_bytes
from threefold.cost.memory.threefold.timelines.norm_inputs import (
    expert_norm_bytes,
    has_own_norms,
    norm_bytes,
    norms_in_fp32,
    out_norm_bytes,
    router_input_bytes,
    shared_norm_bytes,
    value_norm_bytes,
)
from threefold.cost.memory.threefold.timelines.recurrent_mixers import delta_saved_bytes, mamba_saved_bytes
from threefold.cost.stage_contents import first_gradient_in
from threefold.spec.model import CompressedSpec, GqaSpec, Layer, MlaSpec
from threefold.spec.stacks import FUSED_ACTIVATIONS

# Tensors of the expert width; 5 with silu.
_SAVED_BY_EXPERTS = {"clamped swiglu": 8.0, "relu2": 3.0, "limited silu": 7.0}


def layer_activations(local: LocalSizes, layer: Layer) -> Terms:
    """Bytes that one layer saves for one microbatch, offload aside."""
    begins = first_gradient_in(layer)
    if begins == "none":
        return {}
    if "full" in local.recompute:
        inputs = local.residual_bytes * local.recompute_units_per_layer
        outputs = saved_output_bytes(local, layer)
        return {"norms": inputs} | ({"attention": outputs} if outputs else {})
    if begins != "input":
        return _ffn_activations(local, layer, {"norms": 0.0, "attention": 0.0})
    mixer_norm = _norm(local, layer.mixer != "none", local.gemm_input_bytes * mixer_saves_norm(local, layer))
    return _ffn_activations(local, layer, {"norms": mixer_norm, "attention": mixer_bytes(local, layer)})


def _ffn_activations(local: LocalSizes, layer: Layer, saved: Terms) -> Terms:
    """`saved` of the mixer, with what the feed-forward part and its norm save."""
    saved["norms"] += ffn_norm_bytes(local, layer)
    if layer.ffn == "dense":
        saves_mlp = "mlp" not in local.recompute
        saved["mlp"] = mlp_bytes(local, "mlp", local.model.dense_dim, local.gathers_sequence) if saves_mlp else 0.0
    elif layer.ffn == "moe" and "moe" not in local.recompute:
        saved |= {"router": _router(local) + router_input_bytes(local), "experts": expert_bytes(local)}
        saved["dispatch"] = _dispatch(local) + expert_norm_bytes(local)
        saved["shared_experts"] = shared_expert_bytes(local)
        if first_gradient_in(layer) == "ffn" and "router" not in local.saved_inputs:
            saved["router"] = 0.0
            saved |= {} if "expert_rows" in local.saved_inputs else {"experts": 0.0, "dispatch": 0.0}
    return saved


def ffn_norm_bytes(local: LocalSizes, layer: Layer) -> float:
    """What the norm before the feed-forward part saves: its input, if that has a gradient, and its output."""
    # A router, and a module that is recomputed, save the norm's output unquantized.
    is_unquantized = layer.ffn == "moe" or _recomputes_ffn(local, layer)
    output_bytes = local.element_bytes if is_unquantized else local.gemm_input_bytes
    saved = _norm(local, layer.ffn != "none", output_bytes * _ffn_saves_norm(local, layer))
    return saved - (local.tokens * norm_bytes(local, local.model.dim) if first_gradient_in(layer) == "ffn" else 0.0)


def recomputed_activations(local: LocalSizes, layer: Layer, plain: LocalSizes) -> Terms:
    """The most that a layer holds while it is recomputed; `plain` are the sizes without recompute."""
    made = layer_activations(plain, layer)
    fractions = dict.fromkeys(("dispatch", "experts", "shared_experts"), local.expert_chunk_fraction)
    fractions |= {"mlp": local.mlp_chunk_fraction}
    made = {name: size * fractions.get(name, 1.0) for name, size in made.items()}
    if made.get("attention"):
        made["attention"] -= sum(_heads_in_groups(local, layer, plain))
        made["attention"] += late_recomputed_bytes(local, layer, plain)
    return made


def late_recomputed_bytes(local: LocalSizes, layer: Layer, plain: LocalSizes) -> float:
    """The part of `recomputed_activations` that is made only in the mixer's backward: heads, group by group."""
    return _heads_in_groups(local, layer, plain)[0]


def _heads_in_groups(local: LocalSizes, layer: Layer, plain: LocalSizes) -> tuple[float, float]:
    """What attention saves of heads that run in groups: of one group, and of all others."""
    spec = attention_of(local, layer)
    if isinstance(spec, MlaSpec) and layer.mixer == "attention" and local.head_chunk_fraction < 1:
        every = mla_up_bytes(plain, spec)
        return every * local.head_chunk_fraction, every * (1 - local.head_chunk_fraction)
    if not isinstance(spec, GqaSpec) or (group := gqa_group(local, spec)).is_all:
        return 0.0, 0.0
    # All but the outputs and log-sum-exps of the kernel, which a group leaves behind.
    kv = max(1.0, spec.num_kv_heads / local.tp) * spec.head_dim
    keys = 2 * local.element_bytes * kv + (norm_bytes(local, kv, kv / spec.head_dim) if spec.qk_norm else 0.0)
    outputs = (local.element_bytes * spec.head_dim + FP32) * spec.num_heads / local.tp
    every = (_gqa(plain, spec) - outputs) * local.gathered_tokens
    of_group = group.heads * local.tp / spec.num_heads * (every - keys * local.gathered_tokens)
    of_group += group.kv_heads * spec.head_dim / kv * keys * local.gathered_tokens
    return of_group, every - of_group


def _norm(local: LocalSizes, exists: bool, output_bytes: float) -> float:
    """The input of a norm over the residual stream, and `output_bytes` for each element of its output."""
    if not exists:
        return 0.0
    dim = local.model.dim
    return local.tokens * (norm_bytes(local, dim) + output_bytes * dim) + stream_bytes(local)


def stream_bytes(local: LocalSizes) -> float:
    """What a part of a layer saves around several residual streams: all of them before it, the weights of the write
    and its output. What the weights are computed from is recomputed, and so is the norm's input with the norm."""
    streams = local.model.streams
    if streams is None:
        return 0.0
    output = local.element_bytes * local.model.dim * (0 if "layernorm" in local.recompute else 1)
    return local.residual_bytes + local.tokens * (output + FP32 * streams.num_weights)


def mixer_saves_norm(local: LocalSizes, layer: Layer) -> bool:
    """Whether the mixer's first GEMM saves the norm's output. A tensor-parallel module saves what it gathered instead;
    MLA gathers after its down projections."""
    is_mla = isinstance(local.model.attention_of(layer), MlaSpec | CompressedSpec)
    if "mixer" not in local.saved_inputs:
        return False
    return "layernorm" not in local.recompute and (is_mla or not local.gathers_sequence)


def _recomputes_ffn(local: LocalSizes, layer: Layer) -> bool:
    return {"dense": "mlp", "moe": "moe"}.get(layer.ffn) in local.recompute


def _ffn_saves_norm(local: LocalSizes, layer: Layer) -> bool:
    """Whether the feed-forward part saves the output of the norm before it."""
    inputs = local.saved_inputs
    own_norms = layer.ffn == "moe" and has_own_norms(local)
    if "layernorm" in local.recompute:
        return (own_norms or not local.gathers_sequence) and _shared_save_input(local, layer)
    if _recomputes_ffn(local, layer):
        return True  # the input of what is recomputed
    if own_norms:
        return "normed" in inputs
    moe = local.model.moe
    if layer.ffn == "moe" and moe:
        shared_save = bool(moe.shared_width) and not local.gathers_sequence and "shared" in inputs
        shared_save = shared_save or (bool(moe.shared_gate) and "shared_gate" in inputs)
        in_place = local.experts_read_in_place and not local.quantized_bytes and "expert_rows" in inputs
        return (not local.routes_in_fp32 and "router" in inputs) or shared_save or in_place
    return not local.gathers_sequence and "mlp" in inputs


def _shared_save_input(local: LocalSizes, layer: Layer) -> bool:
    """Whether shared experts save their input although the norm before them is recomputed: EP overlap runs them as a
    part of the layer by themselves, which does not see that its input could be made again."""
    moe = local.model.moe
    has_shared = layer.ffn == "moe" and moe is not None and bool(moe.shared_width) and "shared" in local.saved_inputs
    return has_shared and local.plan.knobs.ep_overlap and "shared_experts" not in local.recompute


def gathered_input_bytes(local: LocalSizes, module: str) -> float:
    """The sequence as a tensor-parallel module (mixer, mlp or shared) gathers and saves it; 0 where it is the norm's
    output, recomputed, or read by frozen weights alone."""
    if module not in local.saved_inputs:
        return 0.0
    is_recomputed = "layernorm" in local.recompute and not local.overlaps_tp
    is_recomputed = is_recomputed and not (module == "shared" and has_own_norms(local))
    is_saved_elsewhere = not local.gathers_sequence or is_recomputed
    return 0.0 if is_saved_elsewhere else local.gemm_input_bytes * local.model.dim * local.gathered_tokens


def mixer_bytes(local: LocalSizes, layer: Layer) -> float:
    """Bytes that the mixer saves, with its gathered input."""
    model = local.model
    if layer.mixer == "mamba" and model.mamba:
        adapters = local.adapter_bytes("attention", 2, local.gathered_tokens)
        return gathered_input_bytes(local, "mixer") + adapters + mamba_saved_bytes(local, model.mamba)
    if layer.mixer == "delta" and model.delta:
        adapters = local.adapter_bytes("attention", 2, local.gathered_tokens)
        return gathered_input_bytes(local, "mixer") + adapters + delta_saved_bytes(local, model.delta)
    spec = model.attention_of(layer)
    if spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return _mla(local, spec)
    adapters = local.adapter_bytes("attention", 4, local.gathered_tokens)
    if isinstance(spec, CompressedSpec):
        return _compressed(local, spec) + adapters
    saved = gathered_input_bytes(local, "mixer") + _gqa(local, spec) * local.gathered_tokens
    return saved + out_norm_bytes(local, spec) + adapters


def _gqa(local: LocalSizes, spec: GqaSpec) -> float:
    """Bytes per token: queries and keys before their norm and after rotation, values, the attention output (in plain
    torch twice, in the kernel's layout and in that of the output projection), tables of the rotation."""
    b, head = local.element_bytes, spec.head_dim
    q, kv = spec.q_dim / local.tp, max(1.0, spec.num_kv_heads / local.tp) * head
    heads = q / head
    saved = b * (q + 2 * kv)
    if spec.gated:
        saved += 2 * b * q + b * q  # query and gate as projected; the gate's sigmoid
    if spec.clip_qkv is not None:
        saved += b * (q + 2 * kv)  # what was clipped
    if spec.qk_norm:
        num_norms = 2 if spec.qk_norm_over == "projection" else (q + kv) / head
        saved += norm_bytes(local, q + kv, num_norms) - (b * q if spec.gated and not norms_in_fp32(local) else 0)
    saved += value_norm_bytes(local, spec, kv)
    if "core_attn" not in local.recompute:
        saves_input = "attention_output" in local.saved_inputs
        copies_output = spec.gated or not (local.has_fused_kernels or local.attends_in_blocks(spec))
        saved += b * q + FP32 * heads + (local.gemm_input_bytes * q if copies_output and saves_input else 0)
        # The output of ring attention has another layout than the output projection reads.
        saved += b * q if local.has_fused_kernels and local.plan.layout.cp > 1 and saves_input else 0
    if local.is_16_bit and not local.has_fused_kernels:
        saved += 4 * b * spec.rope_dim / 2
    return saved + (INT64 if spec.sinks else 0)


def _compressed(local: LocalSizes, spec: CompressedSpec) -> float:
    """Latents and keys before their norms and after, what entries are pooled from and the weights for it, queries
    before their norm and turned, outputs as they come and turned back, and all groups' outputs."""
    b, s, t, head = local.element_bytes, local.gathered_tokens, local.tokens, spec.head_dim
    q, heads = spec.q_dim / local.tp, spec.num_heads / local.tp
    core = 0.0 if "core_attn" in local.recompute else 2 * b * q + FP32 * heads
    saved = b * (2 * q + head + spec.out_groups * spec.out_rank / local.tp) + FP32 * heads + core
    tables = 3 * b * spec.rope_dim if local.is_16_bit else 0
    # With TP all latents are gathered side by side, and what reads one of them saves all.
    saved += b * (spec.q_rank + head + 2 * spec.pooled_columns if local.gathers_sequence else spec.q_rank) + tables
    if spec.rate:
        pooled = b if not spec.overlaps and local.gathers_sequence else 2 * b
        saved += (pooled + FP32) * spec.pooled_columns + 2 * b * head / spec.rate
    if spec.indexer is not None:
        saved += FP32 * min(spec.indexer.top_k, local.plan.job.seq_len // spec.rate)
    return saved * s + b * (spec.q_rank + head) * t


def _mla(local: LocalSizes, spec: MlaSpec) -> float:
    """Bytes of latents, heads and the attention output."""
    b, heads = local.element_bytes, spec.num_heads / local.tp
    up = 0.0 if "mla_up_proj" in local.recompute else mla_up_bytes(local, spec)
    saves_input = "attention_output" in local.saved_inputs
    outputs = 2 if saves_input and saves_output_twice(local, spec) else 1
    core = 0.0
    if "core_attn" not in local.recompute:
        core = heads * (outputs * b * spec.v_dim + FP32) * local.gathered_tokens
    elif "mla_up_proj" in local.recompute and local.head_chunk_fraction < 1:
        # The output projection saves the outputs of groups of heads, although each group is recomputed.
        core = heads * b * spec.v_dim * local.gathered_tokens
    adapters = local.adapter_bytes("attention", 3, local.gathered_tokens)
    adapters += local.adapter_bytes("attention", 2 if spec.q_rank else 1, local.tokens)
    return mla_latent_bytes(local, spec) + up + core + chosen_key_bytes(local, spec) + adapters


def chosen_key_bytes(local: LocalSizes, spec: MlaSpec) -> float:
    """The positions of the keys that an indexer chose for each query, in int32."""
    if spec.indexer is None:
        return 0.0
    return FP32 * min(spec.indexer.top_k, local.plan.job.seq_len) * local.gathered_tokens


def mla_latent_bytes(local: LocalSizes, spec: MlaSpec) -> float:
    """Latents before their norms and after, as the up projections read them."""
    b, t, q_rank = local.element_bytes, local.tokens, spec.q_rank or 0
    latents = b * t * (q_rank + spec.kv_rank + spec.rope_dim)
    if not local.has_fused_kernels:  # two statistics of each norm, and normalized latents
        latents += FP32 * t * (2 * (bool(q_rank) + 1) + q_rank + spec.kv_rank)
    if local.plan.exchanges_latents:
        return latents + exchanged_latent_bytes(local, spec)
    normed = q_rank + spec.kv_rank + (spec.rope_dim if local.gathers_sequence else 0)
    normed = normed if "latents" in local.saved_inputs else 0
    latents += local.gemm_input_bytes * normed * (local.gathered_tokens if local.gathers_sequence else t)
    if not q_rank and (local.gathers_sequence or local.quantized_bytes) and "mixer" in local.saved_inputs:
        # Queries come from the norm's output: from the gathered one, or quantized apart from the other projection's.
        latents += local.gemm_input_bytes * local.model.dim * local.gathered_tokens
    return latents


def exchanged_latent_bytes(local: LocalSizes, spec: MlaSpec) -> float:
    """What attention over latents saves of its inputs, never quantized: the queries' latents, and those of keys and
    values beside the rotated key. With TP the first are a part of all that was gathered."""
    kv, s, q_rank = spec.kv_rank + spec.rope_dim, local.gathered_tokens, spec.q_rank or 0
    recomputes = "core_attn" in local.recompute  # then the latents are saved as they are, and not side by side
    joined = spec.kv_rank if recomputes and not local.gathers_sequence else 0 if recomputes else kv
    if not local.gathers_sequence:
        # Without latents of queries their input is the norm's output, which other GEMMs save quantized.
        queries = q_rank or (local.model.dim if local.quantized_bytes else 0)
        return local.element_bytes * s * (queries + joined)
    return local.element_bytes * s * ((q_rank or local.model.dim) + kv + joined)


def saves_output_twice(local: LocalSizes, spec: GqaSpec | MlaSpec) -> bool:
    """Whether the output projection saves another tensor than the attention kernel: in plain torch, behind a gate, or
    where the sequence is sharded over CP. Otherwise both save the kernel's output."""
    is_sharded = local.plan.layout.cp > 1
    if is_sparse(spec):
        return False
    is_transposed = is_sharded or not (local.has_fused_kernels or local.attends_in_blocks(spec))
    if isinstance(spec, MlaSpec):
        return not local.plan.exchanges_latents and is_transposed
    return spec.gated or is_transposed


def mla_up_bytes(local: LocalSizes, spec: MlaSpec) -> float:
    """Queries and keys joined with their rotary parts, and the tensor of keys and values that the values are a view
    of. Context-parallel ranks save what they exchanged: contiguous values, or no heads at all. Where attention is
    recomputed, with the exchange inside, they save what they made."""
    b, heads = local.element_bytes, spec.num_heads / local.tp
    if local.plan.exchanges_latents:
        return 0.0
    is_exchanged = local.plan.layout.cp > 1 and local.cp_comm != "all_gather" and "core_attn" not in local.recompute
    values = spec.v_dim if is_exchanged else spec.nope_dim + spec.v_dim
    return b * heads * (2 * spec.qk_dim + values) * local.gathered_tokens


def mlp_bytes(local: LocalSizes, module: str, hidden: float, with_input: bool) -> float:
    """Gate, up, their activated product and, in plain torch, the activation; `with_input` adds the gathered input.
    Without a gate, the positive part of up and its square. `module` is mlp or shared."""
    is_fused = local.has_fused_kernels and local.model.activation in FUSED_ACTIVATIONS
    num_saved = (2 if is_fused else 3) if local.model.glu else 1
    num_saved += 2 if local.model.activation == "limited silu" else 0
    product = local.gemm_input_bytes if f"{module}_product" in local.saved_inputs else 0.0
    saved = (num_saved * local.element_bytes + product) * hidden / local.tp * local.gathered_tokens
    saved += local.adapter_bytes(
        "mlp" if module == "mlp" else "shared_experts", 1 + local.num_fc1, local.gathered_tokens
    )
    return saved + (gathered_input_bytes(local, module) if with_input else 0.0)


def _router(local: LocalSizes) -> float:
    """Logits, the choice, and scores where a balancing loss reads them. Without a kernel for it tokens and weight are
    saved in fp32; plain torch also saves the sorted indices of all experts, although only the first top-k are used."""
    moe, job = local.model.moe, local.plan.job
    assert moe is not None
    each = FP32 * moe.num_experts
    num_saved = moe.num_experts + (local.tokens if "router" in local.saved_inputs else 0)
    in_fp32 = FP32 * local.model.dim * num_saved if local.routes_in_fp32 else 0.0
    if local.has_fused_kernels:
        scores = FP32 * (moe.num_experts + 1) if job.aux_loss or job.seq_aux_loss else 0
        return in_fp32 + (each + INT64 * moe.top_k + scores) * local.tokens
    each += INT64 * (moe.top_k if job.routing == "forced-balance" else moe.num_experts)
    if moe.score == "softmax" and moe.norm_topk:
        each += FP32 * moe.num_experts
    each += 2 * FP32 * moe.top_k
    return in_fp32 + each * local.tokens


def _dispatch(local: LocalSizes) -> float:
    """Rows permuted by expert, which FC1 saves, and their indices and weights."""
    layout = local.plan.layout
    if local.experts_read_in_place:
        return 3 * FP32 * local.dispatched_rows
    is_exchanged = layout.ep * layout.etp > 1
    indices_and_weights = INT64 * 2 * local.dispatched_rows + FP32 * (3 if is_exchanged else 1) * local.expert_rows
    # A quantized row counts as the experts'. Frozen experts save none.
    row_bytes = 0 if local.quantized_bytes and not local.has_adapters else local.element_bytes
    row_bytes = row_bytes if "expert_rows" in local.saved_inputs else 0
    return row_bytes * local.model.dim * local.expert_rows + indices_and_weights


def expert_bytes(local: LocalSizes) -> float:
    """FC1's output (gate and up), the activation, its product with up, and that product times the router's weight.
    Without a gate, the positive part of FC1's output, its square, and the square times the router's weight."""
    moe, model, b = local.model.moe, local.model, local.element_bytes
    assert moe is not None
    hidden, low = moe.expert_dim / local.plan.layout.etp, local.quantized_bytes
    inputs = local.saved_inputs
    rows_low = low if "expert_rows" in inputs and not local.has_adapters else 0.0
    # FC2's bias is saved for every row, to be multiplied by the router's weight.
    biases = (b * model.dim + 2 * INT64) * local.expert_rows if moe.bias else 0.0
    num_saved = _SAVED_BY_EXPERTS.get(model.activation, 5.0)
    if local.uses_fused_experts:
        padded_rows = local.padded_expert_rows if rows_low else 0
        return 2 * b * hidden * local.expert_rows + rows_low * model.dim * padded_rows
    num_saved -= 0 if "expert_product" in inputs else 1
    biases += local.adapter_bytes("experts", 2, local.expert_rows)
    if "moe_act" in local.recompute:
        num_saved, quantized_act = float(local.num_fc1), 0.0
    else:
        quantized_act = low * hidden if "expert_product" in inputs and not local.has_adapters else 0.0
    if low:
        num_saved -= 1 if quantized_act else 0
        return (num_saved * b * hidden + quantized_act + rows_low * model.dim) * local.expert_rows + biases
    return num_saved * b * hidden * local.expert_rows + biases


def shared_expert_bytes(local: LocalSizes) -> float:
    """Bytes that the shared experts save, with their gathered or quantized input."""
    moe = local.model.moe
    assert moe is not None
    if not moe.shared_width or "shared_experts" in local.recompute:
        return 0.0
    gate = local.element_bytes * (local.model.dim + 2) * local.tokens if moe.shared_gate else 0.0
    is_quantized = not local.gathers_sequence and "shared" in local.saved_inputs and not local.has_adapters
    quantized_input = local.quantized_bytes * local.model.dim * local.tokens if is_quantized else 0.0
    gathered_input = gathered_input_bytes(local.without_recompute if local.plan.knobs.ep_overlap else local, "shared")
    saved = mlp_bytes(local, "shared", moe.shared_width, with_input=False) + shared_norm_bytes(local)
    return saved + gathered_input + gate + quantized_input
