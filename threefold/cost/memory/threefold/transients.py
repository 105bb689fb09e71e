"""Tensors that our own engine holds only for a moment, on top of saved activations: loss, forward, backward, optimizer.

Every function returns bytes on one rank. `peak.py` and `overlap_peak.py` add them to what the microbatches in flight
hold at the same time. `b` below is the bytes of an element, `rows` the bytes of one tensor of the experts' rows.
"""

import math

from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.local_sizes import CHUNK_LIMIT_BYTES, FP32, LocalSizes
from threefold.cost.stage_contents import StageContents
from threefold.spec.model import Layer, MlaSpec
from threefold.units import GIB

LOGITS_CHUNK_BYTES = {"cpu": GIB / 4}  # logits of one chunk of the loss, counted in fp32; 5 GiB on GPUs
LOSS_TILE = 128  # tokens
# An expert wider than this runs in torch's GEMMs, which are then faster than our kernels and want contiguous rows.
WIDEST_IN_PLACE = 1024
MUON_ELEMENTS = 2**26  # elements of the matrices that Muon orthogonalizes together


def loss_transients(local: LocalSizes, num_heads: int) -> tuple[float, float]:
    """Bytes while a chunk of logits becomes a loss, and bytes that all output layers save for the backward."""
    b, dim, s = local.element_bytes, local.model.dim, local.gathered_tokens
    vocab = -(-local.model.vocab // local.tp)
    max_tokens = max(64, LOGITS_CHUNK_BYTES.get(local.plan.chip.architecture, 5 * GIB) // (4 * vocab))
    num_chunks = max(1, -(-s // max_tokens))
    chunk = min(s, -(-s // (num_chunks * LOSS_TILE)) * LOSS_TILE)
    table = vocab * dim
    weight_grad = table * (b if num_chunks == 1 else FP32)
    saved = b * dim * s + weight_grad
    on_gpu = local.plan.chip.architecture not in LOGITS_CHUNK_BYTES
    if local.is_16_bit and on_gpu:
        # The gradient overwrites the logits, and cuBLAS accumulates into the head's gradient as it stores.
        logits, accumulating = b * chunk * (vocab + dim), float(weight_grad)
    else:
        logits = (3 * FP32 - b if local.is_16_bit else 2 * FP32) * chunk * vocab
        accumulating = 0.0
        if num_chunks > 1:
            accumulating = weight_grad + (b * table if local.is_16_bit or num_chunks > 2 else 0)
    hidden = b * dim * s  # what the loss reads
    return logits + accumulating + hidden + b * dim * s + (num_heads - 1) * saved, num_heads * saved


def embedding_transients(local: LocalSizes, is_used_twice: bool) -> float:
    """The gradient of the embedding table. A GPU sums its rows in fp32: one per token, and one more for every ten.

    A table that is used twice has a gradient from each use, and their sum.
    """
    b, dim = local.element_bytes, local.model.dim
    tables = (3 if is_used_twice else 1) * local.model.vocab / local.tp
    in_fp32 = 1.1 * FP32 * dim * local.gathered_tokens if local.has_fused_kernels and not is_used_twice else 0.0
    return b * dim * (tables + local.tokens) + in_fp32


def optimizer_transients(local: LocalSizes, contents: StageContents) -> float:
    """Muon's tensors in fp32: the largest stack of matrices with momentum, this rank's shard of it, and its orthogonal
    result; on the way, for some matrices at a time, four times their size and a square of the shorter side."""
    model, layout = local.model, local.plan.layout
    if local.plan.job.optimizer != "muon":
        return 0.0
    stacks: list[tuple[float, int, int]] = []  # elements, the side of a matrix that is not the model's, shards
    if any(layer.ffn == "dense" for layer in contents.layers):
        stacks.append((model.dense_dim * model.dim, model.dense_dim, layout.dp * layout.cp))
    if model.moe and any(layer.ffn == "moe" for layer in contents.layers):
        side = 2 * model.moe.expert_dim
        stacks.append((side * model.dim * model.moe.num_experts / layout.ep, side, layout.edp))
    if not stacks:
        return 0.0
    elements, side, shards = max(stacks)
    local_shard = elements / shards if shards > 1 else 0.0
    per_element = 4 + min(side, model.dim) / max(side, model.dim)
    at_a_time = min(elements, max(side * model.dim, MUON_ELEMENTS))
    return FP32 * (2 * elements + local_shard + per_element * at_a_time)


def forward_transients(local: LocalSizes, layer: Layer) -> float:
    """Bytes at the end of a layer's forward."""
    b, dim = local.element_bytes, local.model.dim
    if layer.ffn != "moe" or local.model.moe is None:
        return 2 * b * dim * local.gathered_tokens
    row = b * dim
    layout, knobs = local.plan.layout, local.plan.knobs
    if layout.ep * layout.etp == 1:
        unpermuted = 0 if local.has_fused_kernels else local.expert_rows
        return row * (local.expert_rows + unpermuted) * local.expert_chunk_fraction + row * local.tokens
    received = local.expert_rows / layout.etp
    if knobs.dispatcher == "alltoall":
        # Rows as received, results as sent back, as they arrive, and as they are summed. With a bias the peak is
        # earlier: rows as received, results, the bias times the router's weight, and their sum.
        summed = local.tokens if local.has_fused_kernels else local.dispatched_rows
        gathered = local.expert_rows if layout.etp > 1 else 0
        has_bias = local.model.moe.bias and not local.uses_fused_experts
        biased = row * 4 * local.expert_rows if has_bias else 0.0
        return max(row * (2 * received + local.dispatched_rows + summed + gathered), biased)
    return row * (2 * local.expert_rows + 2 * local.tokens)


def ffn_backward_transients(local: LocalSizes, layer: Layer) -> float:
    """The most bytes in the backward of a layer's feed-forward part, less the activations it has freed by then."""
    b, dim, model = local.element_bytes, local.model.dim, local.model
    if layer.ffn == "dense":
        hidden = model.dense_dim / local.tp
        is_recomputed = bool(local.recompute & {"mlp", "full"})
        tokens = local.gathered_tokens * (local.mlp_chunk_fraction if is_recomputed else 1)
        weight_grad = b * hidden * dim
        # FSDP holds the first weight gradients until all of the unit are there.
        pending = weight_grad if local.plan.knobs.data_parallel != "zero1" else 0.0
        act_grad = b * hidden * tokens
        # The activation's gradient with the last weight's; then those of gate and up, when the product is freed.
        fc1_grads = (2 if local.has_fused_kernels else 1) * act_grad
        return b * dim * local.gathered_tokens + max(weight_grad + act_grad, pending + fc1_grads)
    return max(expert_backward_steps(local).values()) if layer.ffn == "moe" else mixer_backward_transients(local, layer)


def expert_backward_steps(local: LocalSizes) -> Terms:
    """The same for routed experts, step by step in the order of the backward."""
    b, dim, moe = local.element_bytes, local.model.dim, local.model.moe
    assert moe is not None
    hidden, weight_grads = _expert_sizes(local)
    r = local.expert_rows * local.expert_chunk_fraction
    rows = b * dim * r
    act = (local.element_bytes + 2 * FP32 if local.is_16_bit else 2 * FP32) * hidden * r
    biased = 0.0
    if moe.bias:  # its backward comes first, for its rows and the router's weights in fp32; then its rows are freed
        recomputed = 6 * b * hidden * r if "moe_act" in local.recompute else 0.0
        biased, act = (2 * b + 2 * FP32) * dim * r - recomputed, act - rows
    pending = weight_grads / 3 if _experts_reduce_together(local) else 0.0  # FC2's, which are reduced with FC1's
    # A chunk of tokens adds to the weight gradients of the chunks before it.
    summed = 0.0 if local.expert_chunk_fraction == 1 else weight_grads
    summed += b * dim * local.tokens if local.experts_read_in_place else 0.0
    if local.uses_fused_experts:
        return {"fused_group_mlp": _fused_expert_backward(local, rows, hidden * r, weight_grads) + summed}
    # Rows on their way back; FC2's two GEMMs; the activation, in fp32 for the router's weights; FC1's GEMMs. In low
    # precision each expert has a weight gradient of its own before they are stacked.
    weight_grads *= 2 if local.quantized_bytes else 1
    steps = {
        "combine": 2 * rows,
        "expert_fc2": max(rows + b * hidden * r + weight_grads / 3, biased),
        "moe_act": act + pending,
        "expert_fc1": rows - 3 * b * hidden * r + 2 * weight_grads / 3 + pending,
    }
    return {name: size + summed for name, size in steps.items()}


def _experts_reduce_together(local: LocalSizes) -> bool:
    """Whether FSDP holds the experts' weight gradients until all of a layer's are there."""
    layout = local.plan.layout
    return local.plan.knobs.data_parallel != "zero1" and layout.edp > layout.replicate


def _fused_expert_backward(local: LocalSizes, rows: float, hidden: float, weight_grads: float) -> float:
    """Gradients of the rows on both sides, of the activation and FC1's output, and of the weights. bf16 kernels add
    weight gradients to the main gradients as they make them; FP8 kernels make them one by one."""
    b, low = local.element_bytes, local.quantized_bytes
    if local.fuses_grad_accumulation:
        weight_grads *= 2 / 3 if low else 0
    if local.experts_read_in_place and not low and _expert_sizes(local)[0] <= WIDEST_IN_PLACE:
        # Gradients of tokens are read in place, and gradients of rows are summed into those of tokens.
        token_grads = b * local.model.dim * local.tokens * local.expert_chunk_fraction
        return max(3 * b * hidden, rows + token_grads + 2 * b * hidden + weight_grads)
    if not low:
        return max(rows + 4 * b * hidden, 2 * rows + 2 * b * hidden + weight_grads)
    transposed = low * rows / b
    return max(rows + transposed + (b + 5 * low) * hidden, 2 * rows + 2 * low * hidden + weight_grads)


def _expert_sizes(local: LocalSizes) -> tuple[float, float]:
    """The hidden width of an expert on this rank, and bytes of the weight gradients of all experts on it."""
    layout, moe = local.plan.layout, local.model.moe
    assert moe is not None
    hidden = moe.expert_dim / layout.etp
    return hidden, local.element_bytes * 3 * hidden * local.model.dim * moe.num_experts / layout.ep


def mixer_backward_transients(local: LocalSizes, layer: Layer) -> float:
    """Bytes in the backward of attention: gradients of its output, of queries, keys and values, and an fp32 copy of the
    queries' gradients, in which they are accumulated."""
    spec = local.model.attention if layer.mixer == "attention" else local.model.local_attention
    if spec is None:
        return 0.0
    b, tp, heads = local.element_bytes, local.tp, spec.num_heads / local.tp
    if scores := local.score_bytes(spec):  # gradients of the softmax's output and of its input
        return 2 * scores
    if isinstance(spec, MlaSpec):
        head, values = spec.qk_dim, heads * spec.v_dim
        q = k = heads * head
        out, is_grouped = values, False
    else:
        head = spec.head_dim
        q, k = spec.q_dim / tp, max(1.0, spec.num_kv_heads / tp) * head
        out, values, is_grouped = q, k, spec.num_kv_heads != spec.num_heads
    # In grouped attention every query head first makes gradients of its own for keys and values.
    summed = FP32 * (q + heads) + (2 * b * q if is_grouped else 0)
    residual = b * local.model.dim * local.tokens
    if local.plan.layout.cp > 1 and local.plan.knobs.cp_comm == "p2p":
        # Ring attention: gradients in fp32, for keys and values also those that travel on; received keys and values;
        # two tiles of half a rank's tokens at a time, where MLA's values are padded to the width of keys.
        padded = b * (2 * heads * head + k) / 2 if isinstance(spec, MlaSpec) else 0.0
        sums = FP32 * (q + 2 * k + 2 * values) + b * (k + values) + b * (q + 2 * k) + padded + summed / 2
        return (sums + b * out) * local.gathered_tokens + residual
    if isinstance(spec, MlaSpec):
        per_token = b * (out + q + k + values) + summed
        return per_token * local.head_chunk_fraction * local.gathered_tokens + residual
    groups = min(max(1.0, spec.num_kv_heads / tp), math.ceil(FP32 * q * local.gathered_tokens / CHUNK_LIMIT_BYTES))
    if groups > 1:  # groups of heads run one by one, but the fp32 gradients of queries are laid out for all heads
        summed = FP32 * q + (summed - FP32 * q + b * (q + k + values)) / groups
    return (b * (out + q + k + values) + summed) * local.gathered_tokens + residual
