"""Tensors that our own engine holds only for a moment, on top of saved activations: loss, forward, backward, optimizer.

Every function returns bytes on one rank. `peak.py` and `overlap_peak.py` add them to what the microbatches in flight
hold at the same time. `b` below is the bytes of an element, `rows` the bytes of one tensor of the experts' rows.

Mirrors `engine/layers/cross_entropy.py`, `engine/layers/head_gemms.py`, `engine/layers/embedding.py`,
`engine/layers/mlp.py`, `engine/models/head.py`, `engine/kernels/loss_and_optimizer/cross_entropy_fp8.py`,
`engine/attention/mla.py`.
"""

import math
from typing import NamedTuple

from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.local_sizes import CHUNK_LIMIT_BYTES, FP32, LocalSizes, for_layer
from threefold.cost.memory.threefold.timelines.attention_backward import (
    cp_attention_peak,
    delta_backward_peak,
    latent_attention_peak,
    query_blocks_peak,
)
from threefold.cost.memory.threefold.timelines.grouped_heads import (
    gqa_group,
    grouped_backward_bytes,
    kernel_workspace,
)
from threefold.cost.memory.threefold.timelines.moe_backward import moe_backward_steps
from threefold.cost.memory.threefold.timelines.moe_forward import moe_forward_peak, saved_bytes
from threefold.cost.memory.threefold.timelines.optimizer_step import muon_peak
from threefold.cost.memory.threefold.timelines.recurrent_mixers import mamba_backward_peak
from threefold.cost.stage_contents import StageContents
from threefold.spec.model import Layer, MlaSpec
from threefold.spec.stacks import FUSED_EXPERTS
from threefold.units import GIB

LOGITS_CHUNK_BYTES = {"cpu": GIB / 4}  # logits of one chunk of the loss, counted in fp32; 5 GiB on GPUs
LOSS_TILE = 128  # tokens
FP8_CHUNKS_PER_WGRAD = 4  # chunks of the loss whose FP8 gradients wait for one weight-gradient GEMM of the head
FP8_BLOCK_BYTES = 1 + FP32 / 128  # an element in blocks of 1 x 128, with its part of an fp32 scale


class LossBytes(NamedTuple):
    """What the loss takes on one rank."""

    peak: float  # while a chunk of logits becomes a loss
    saved: float  # by all output layers, for the backward: gradients that it scales in place
    cast: float  # weight gradients of one output layer in the dtype of the weight, where they were summed in fp32
    held: float  # the part of `saved` that is there at the peak


def loss_transients(local: LocalSizes, num_heads: int) -> LossBytes:
    """The bytes of the loss, of which a model with multi-token prediction has several."""
    b, dim, s = local.element_bytes, local.model.dim, local.gathered_tokens
    vocab, num_chunks = -(-local.model.vocab // local.tp), num_loss_chunks(local)
    chunk = min(s, -(-s // (num_chunks * LOSS_TILE)) * LOSS_TILE)
    if _has_fp8_head(local):
        return _fp8_loss_transients(local, num_heads, chunk)
    table = vocab * dim
    on_gpu = local.plan.chip.architecture not in LOGITS_CHUNK_BYTES
    # fp16 has too small a range for a long sum.
    sums_wider = num_chunks > (2 if on_gpu else 1) or local.plan.knobs.precision == "fp16"
    trains_head = "head" in local.saved_inputs
    weight_grad = table * (FP32 if sums_wider else b) * trains_head
    saved = b * dim * s + weight_grad
    if local.is_16_bit and on_gpu:
        # The gradient overwrites the logits, and cuBLAS accumulates into the head's gradient as it stores.
        logits, accumulating = b * chunk * vocab, float(weight_grad)
    else:
        num_fp32 = 3 if local.is_16_bit or local.tp > 1 else 2
        logits = (num_fp32 * FP32 - (b if local.is_16_bit else 0)) * chunk * vocab
        accumulating = 0.0
        if num_chunks > 1 and trains_head:
            accumulating = weight_grad + (b * table if local.is_16_bit or num_chunks > 2 else 0)
    slope, hidden = 0.0, b * dim * s  # the derivative of capped logits; what the loss reads
    if local.model.logit_softcap is not None:
        slope = b * chunk * vocab
    if local.model.head_bias:
        hidden += b * (
            table + dim * s
        )  # copies of the matrix and of the hidden states, each with a column for the bias
    if slope and local.is_16_bit and on_gpu:  # it is freed before the head's gradient is made, or added to
        logits = max(logits + accumulating, b * chunk * vocab + slope + (accumulating if num_chunks > 1 else 0.0))
        slope = accumulating = 0.0
    held = num_heads * saved - (0.0 if accumulating else weight_grad)
    logits += slope + accumulating
    cast = b * table * trains_head if sums_wider and local.is_16_bit else 0.0
    return LossBytes(logits + hidden + b * dim * s + (num_heads - 1) * saved, num_heads * saved, cast, held)


def num_loss_chunks(local: LocalSizes) -> int:
    """Chunks of tokens whose logits the loss computes one after the other."""
    vocab = -(-local.model.vocab // local.tp)
    max_tokens = max(64, LOGITS_CHUNK_BYTES.get(local.plan.chip.architecture, 5 * GIB) // (4 * vocab))
    return max(1, math.ceil(local.gathered_tokens / (max_tokens // 2 if _has_fp8_head(local) else max_tokens)))


def _has_fp8_head(local: LocalSizes) -> bool:
    return local.plan.low_precision and local.plan.knobs.fp8_output


def _fp8_loss_transients(local: LocalSizes, num_heads: int, chunk: float) -> LossBytes:
    """`loss_transients` where the output layer is in FP8. Each weight gradient is a tensor of its own, which is added
    to those before."""
    b, dim, s = local.element_bytes, local.model.dim, local.gathered_tokens
    vocab, trains_head = -(-local.model.vocab // local.tp), "head" in local.saved_inputs
    in_one_kernel = local.plan.knobs.precision in FUSED_EXPERTS and local.model.logit_softcap is None
    wgrad_tokens = min(s, FP8_CHUNKS_PER_WGRAD * chunk if in_one_kernel else chunk)
    weight_grad = vocab * dim * (FP32 if s > wgrad_tokens else b) * trains_head
    low = FP8_BLOCK_BYTES if in_one_kernel else local.quantized_bytes
    transposed = low * vocab * wgrad_tokens * trains_head
    logits, wgrad = (b + low) * chunk * vocab + b * chunk * dim, weight_grad + low * dim * wgrad_tokens * trains_head
    if in_one_kernel:  # the gradients of the chunks before lie beside the logits of the last one
        peak = transposed + max(logits, wgrad)
    else:
        slope = b * chunk * vocab * (local.model.logit_softcap is not None)
        peak = max(logits, b * chunk * vocab + max(slope, transposed + wgrad))
    peak += weight_grad if s > wgrad_tokens else 0.0
    if local.plan.knobs.data_parallel != "zero1":  # the weight is quantized for one loss, and not kept
        peak += 2 * vocab * dim
    saved = b * dim * s + weight_grad
    cast = b * vocab * dim * trains_head if s > wgrad_tokens else 0.0
    held = num_heads * saved - (0.0 if s > wgrad_tokens or wgrad > logits else weight_grad)
    return LossBytes(peak + 2 * b * dim * s + (num_heads - 1) * saved, num_heads * saved, cast, held)


def embedding_transients(local: LocalSizes, is_used_twice: bool) -> float:
    """The gradient of the embedding table. A GPU keeps two rows in fp32 for every 64 tokens.

    A table that is used twice has a gradient from each use, and their sum.
    """
    b, dim = local.element_bytes, local.model.dim
    if "embedding" not in local.saved_inputs:
        return 0.0
    tables = (3 if is_used_twice else 1) * local.model.vocab / local.tp
    in_fp32 = 2 / 64 * FP32 * dim * local.gathered_tokens if local.has_fused_kernels and not is_used_twice else 0.0
    return b * dim * (tables + local.tokens) + in_fp32


def optimizer_transients(local: LocalSizes, contents: StageContents) -> float:
    """What the optimizer's step holds on top of the states."""
    if local.plan.job.optimizer != "muon":
        return 0.0
    return muon_peak(local.plan, contents, local.accumulates_wider and local.plan.layout.gpus > 1)


def forward_transients(
    local: LocalSizes, layer: Layer, offloaded: Terms | None = None, is_recompute: bool = False
) -> float:
    """The most bytes in a layer's forward on top of what it saves on the device; `offloaded` goes to the host."""
    b, dim = local.element_bytes, local.model.dim
    if layer.ffn != "moe" or local.model.moe is None:
        return 2 * b * dim * local.gathered_tokens + _dense_forward(local, layer)
    if local.recompute & {"moe", "full"}:
        local = local.without_recompute
    # The mixer's output, which the norm before has read, is held until the layer ends.
    on_host = offloaded or {}
    rows, experts = on_host.get("dispatch", 0.0), on_host.get("experts", 0.0)
    peak = moe_forward_peak(local, rows, experts, is_recompute=is_recompute) - (saved_bytes(local) - rows - experts)
    return peak + b * dim * local.tokens


def _dense_forward(local: LocalSizes, layer: Layer) -> float:
    """What a dense MLP holds in its forward and does not save: its input quantized for the last GEMM, and where it is
    recomputed all that it would save."""
    if layer.ffn != "dense":
        return 0.0
    hidden = local.model.dense_dim / local.tp * local.gathered_tokens * local.mlp_chunk_fraction
    low, b = local.quantized_bytes, local.element_bytes
    if local.recompute & {"mlp", "full"}:
        return ((1 + local.num_fc1) * b + 2 * low) * hidden
    return (b + low) * local.model.dense_dim / local.tp * local.gathered_tokens if low else 0.0


def ffn_backward_transients(local: LocalSizes, layer: Layer) -> float:
    """The most bytes in the backward of a layer's feed-forward part, less the activations it has freed by then."""
    if layer.ffn == "dense":
        is_recomputed = bool(local.recompute & {"mlp", "full"})
        return _mlp_backward(local, local.model.dense_dim / local.tp, local.mlp_chunk_fraction if is_recomputed else 1)
    return max(moe_backward_steps(local).values()) if layer.ffn == "moe" else mixer_backward_transients(local, layer)


def freed_product_bytes(local: LocalSizes) -> float:
    """Bytes of the product inside a dense MLP, saved or recomputed, where its backward frees them before it holds
    most."""
    hidden, b = local.model.dense_dim / local.tp, local.element_bytes
    fraction = local.mlp_chunk_fraction if local.recompute & {"mlp", "full"} else 1.0
    weight_grad = b * hidden * local.model.dim * local.trained_fraction
    first = b * local.gathered_tokens * (local.model.dim + fraction * hidden) + weight_grad
    is_freed = _mlp_backward(local, hidden, fraction) > first
    return local.gemm_input_bytes * hidden * local.gathered_tokens * fraction * is_freed


def shared_backward_transients(local: LocalSizes) -> float:
    """The same of shared experts, where they have their backward by themselves."""
    moe = local.model.moe
    return _mlp_backward(local, moe.shared_width / local.tp, 1.0) if moe and moe.shared_width else 0.0


def _mlp_backward(local: LocalSizes, hidden: float, fraction: float) -> float:
    """Bytes in the backward of a gated MLP with so many channels on a rank, for a fraction of the tokens."""
    b, dim, tokens = local.element_bytes, local.model.dim, local.gathered_tokens * fraction
    weight_grad = b * hidden * dim * local.trained_fraction
    # FSDP holds the first weight gradients until all of the unit are there.
    pending = weight_grad if local.plan.knobs.data_parallel != "zero1" else 0.0
    act_grad = b * hidden * tokens
    # The activation's gradient with the last weight's; then those of gate and up, when the product is freed.
    fc1_grads = (2 if local.has_fused_kernels else 1) * act_grad
    fc1_grads += (b - local.gemm_input_bytes) * hidden * tokens  # a quantized product frees less
    gathered, residual = b * dim * local.gathered_tokens, b * dim * local.tokens
    most = max(gathered + weight_grad + act_grad, residual + pending + fc1_grads)
    low = local.quantized_bytes * hidden * tokens
    if local.plan.knobs.precision == "fp8-blockwise":  # the gradients of gate and up side by side, in both directions
        most = max(most, residual + pending + b * dim * tokens + 3 * low)
    elif low:  # gate and up have their backward one by one: gradients of the input, and their sum
        most = max(most, residual + pending + 3 * b * dim * tokens - low)
    return most


def _num_head_groups(local: LocalSizes, kv_heads: float, q: float) -> float:
    """Groups of heads in which attention's backward runs, so that fp32 gradients of a group's queries are bounded."""
    return min(kv_heads, math.ceil(FP32 * q * local.gathered_tokens / CHUNK_LIMIT_BYTES))


def mixer_backward_transients(local: LocalSizes, layer: Layer) -> float:
    """Bytes in the backward of attention: gradients of its output, of queries, keys and values, and an fp32 copy of the
    queries' gradients, in which they are accumulated."""
    local = for_layer(local, layer)
    if layer.mixer == "none":
        return 0.0
    if layer.mixer == "mamba" and local.model.mamba:
        return mamba_backward_peak(local, local.model.mamba)
    if layer.mixer == "delta" and local.model.delta:
        return delta_backward_peak(local, local.model.delta)
    spec = local.model.attention_of(layer)
    if spec is None:
        return 0.0
    b, heads = local.element_bytes, spec.num_heads / local.tp
    if local.attends_in_blocks(spec) and not local.attends_in_tiles:
        return query_blocks_peak(local, spec)
    residual = b * local.model.dim * local.tokens
    if local.plan.layout.cp > 1:
        if isinstance(spec, MlaSpec) and local.plan.exchanges_latents:
            return latent_attention_peak(local, spec) + residual
        return cp_attention_peak(local, spec) + residual
    if isinstance(spec, MlaSpec):
        q = k = heads * spec.qk_dim
        values = heads * spec.v_dim
        # Recomputed heads run in groups from the latents on, where all of them would be too large.
        in_groups = bool(local.recompute & {"mla_up_proj", "full"})
        fraction = local.head_chunk_fraction if in_groups else 1.0
        calls = _num_head_groups(local, heads * fraction, q * fraction)
        gradients = b * (q + k + values)
        per_token = gradients + (FP32 * (q + heads) + (gradients if calls > 1 else 0.0)) / calls
        return (b * values + per_token * fraction) * local.gathered_tokens + residual
    if not (group := gqa_group(local, spec)).is_all:
        return grouped_backward_bytes(local, spec, group)
    gradients = b * spec.head_dim * (2 * group.heads + 2 * group.kv_heads)  # of outputs, queries, keys and values
    workspace = kernel_workspace(local, spec, group.heads, group.kv_heads)
    return (gradients + workspace) * local.gathered_tokens + residual
