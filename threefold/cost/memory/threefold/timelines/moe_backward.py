"""The backward of an MoE layer in our own engine, tensor by tensor, down to the gradient of its rows.

It follows autograd through `engine/moe/layer.py` (`dispatch_and_combine`), the dispatchers and `engine/moe/experts.py`.
Bytes are above the start of the backward, when everything that the layer saves is there: saved tensors count down as
they are freed. What follows (rows back to tokens, router, norm) is lower.

Mirrors `engine/moe/layer.py`, `engine/moe/experts.py`, `engine/dispatch/alltoall.py`, `engine/dispatch/flex_base.py`,
`engine/dispatch/received_rows.py`, `engine/dispatch/rows.py`, `engine/kernels/experts/fused_experts.py`,
`engine/kernels/fp8/fused_experts.py`, `engine/precision/low_precision_experts.py`.
"""

from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.activations import shared_expert_bytes
from threefold.cost.memory.threefold.local_sizes import FP32, SCALE_ROWS, LocalSizes
from threefold.cost.memory.threefold.timelines.moe_forward import MoeRows
from threefold.cost.memory.threefold.timelines.norm_inputs import expert_norm_bytes
from threefold.cost.memory.threefold.timelines.timeline import Timeline

# Weight gradients of experts wider than this come from torch's GEMMs, which want contiguous rows.
WIDEST_IN_PLACE = 1024


def moe_backward_steps(
    local: LocalSizes,
    delays_wgrad: bool = False,
    shared_is_later: bool = False,
    shared_wgrad: float = 0.0,
    line: Timeline | None = None,
) -> Terms:
    """The most bytes in each step of the backward, in order, by the module that an offload would name. Delayed weight
    gradients are not made, and what they need stays: `shared_wgrad` bytes of the shared experts. `shared_is_later`
    where shared experts have their backward behind the routed ones, as EP overlap and shared-expert overlap run
    them. A graph gives the `line` of its pool."""
    moe, steps, is_pooled = local.model.moe, {}, line is not None
    line, waits = line or Timeline(), local.plan.knobs.wgrad_overlap
    delays_wgrad = delays_wgrad or waits
    assert moe is not None
    rows = MoeRows(local, local.expert_chunk_fraction)
    line.make(0.0 if is_pooled else MoeRows(local).tokens)  # the gradient of the residual stream: a graph's input
    if moe.shared_width and not (shared_is_later or local.plan.knobs.shared_expert_overlap):
        line.make(MoeRows(local).tokens)
        line.free(shared_expert_bytes(local.without_recompute) * rows.fraction)
        line.make(shared_wgrad * rows.fraction)
    if moe.own_norms:  # the gradient of the routed experts' output is not that of the residual stream
        line.make(rows.tokens)
        line.free(expert_norm_bytes(local.without_recompute) * rows.fraction)
    if rows.fraction < 1:  # a chunk of tokens adds to the weight gradients of the chunks before it
        line.make(weight_grad_bytes(local), MoeRows(local).tokens)
    if _recomputes_activation(local) and not is_pooled:
        line.free(*_activation(rows))  # the caller counts it from the start, but it is there from FC2's backward on
    line.take_peak()
    if local.experts_read_in_place:
        return {"fused_group_mlp": _in_place(line, rows, delays_wgrad)}
    _combine(line, rows)
    if local.uses_fused_experts:
        (_fused_fp8 if local.quantized_bytes else _fused)(line, rows, delays_wgrad)
        return {"fused_group_mlp": line.take_peak()} | _wgrads_during_dispatch(line, rows, waits)
    steps["combine"] = line.take_peak()
    return steps | _unfused(line, rows, delays_wgrad) | _wgrads_during_dispatch(line, rows, waits)


def _wgrads_during_dispatch(line: Timeline, rows: MoeRows, waits: bool) -> Terms:
    """Weight gradients that waited until the gradients of rows were on their way back: FC2's, then FC1's."""
    if not waits:
        return {}
    made = weight_grad_bytes(rows.local)
    fc2_grads = made / (1 + rows.local.num_fc1)
    line.make(rows.sent, fc2_grads)
    line.free(fc2_grads if rows.local.fuses_grad_accumulation else 0.0)
    line.make(made - fc2_grads)
    return {"wgrads": line.take_peak()}


def early_grad_rows(local: LocalSizes) -> float:
    """Bytes of gradients that have come back to the experts' ranks before a recompute of the layer begins: DeepEP and
    HybridEP need no saved tensor for that. A balancing loss, and shared experts that run last, have their backward
    before and begin it."""
    moe, job, rows = local.model.moe, local.plan.job, MoeRows(local)
    assert moe is not None
    is_begun = (moe.shared_width and not local.plan.knobs.shared_expert_overlap) or job.aux_loss or job.seq_aux_loss
    if rows.dispatcher == "alltoall" or is_begun:
        return 0.0
    return rows.received_tokens if rows.dispatcher == "deepep" else rows.received


def weight_grad_bytes(local: LocalSizes) -> float:
    """Bytes of the weight gradients of all experts of the rank."""
    layout, moe = local.plan.layout, local.model.moe
    assert moe is not None
    hidden = moe.expert_dim / layout.etp
    elements = (1 + local.num_fc1) * hidden * local.model.dim * moe.num_experts / layout.ep
    return local.element_bytes * elements * local.trained_expert_fraction


def _recomputes_activation(local: LocalSizes) -> bool:
    """Whether the activation is recomputed by itself."""
    return "moe_act" in local.recompute and not local.recompute & {"moe", "full"} and not local.uses_fused_experts


def recomputed_activation_bytes(local: LocalSizes) -> float:
    """Bytes of an activation that is recomputed by itself; 0 where none is."""
    return sum(_activation(MoeRows(local, local.expert_chunk_fraction))) if _recomputes_activation(local) else 0.0


def _activation(rows: MoeRows) -> list[float]:
    """What the activation saves, and its output."""
    return [rows.hidden] * (6 if rows.local.model.activation == "clamped swiglu" else 3)


def _combine(line: Timeline, rows: MoeRows) -> None:
    """The gradient of the output back to rows of results by expert, which are left."""
    etp = rows.local.plan.layout.etp
    if rows.dispatcher == "deepep":
        line.make(rows.received_tokens)
        line.replace(rows.received, rows.received_tokens)
    elif rows.dispatcher == "hybridep":
        line.make(rows.received)
    elif rows.is_exchanged:
        line.make(rows.sent)
        line.replace(rows.received, rows.sent)
    else:
        line.make(rows.received)
    if etp > 1:  # a copy for every rank of etp; what they send
        line.replace(rows.gathered, rows.received)
        line.replace(rows.gathered, rows.gathered)
    if rows.is_sorted:
        line.replace(rows.gathered, rows.gathered)


def _reduces_together(local: LocalSizes) -> bool:
    """Whether FSDP holds the experts' weight gradients until all of a layer's are there."""
    layout = local.plan.layout
    return local.plan.knobs.data_parallel != "zero1" and layout.edp > layout.replicate


def _unfused(line: Timeline, rows: MoeRows, delays: bool) -> Terms:
    """FC2, the activation and FC1 of torch's grouped GEMMs, or of one expert after the other in low precision."""
    local, hidden, b = rows.local, rows.hidden, rows.local.element_bytes
    moe, steps, recomputes = local.model.moe, {}, _recomputes_activation(local)
    assert moe is not None
    low, weight_grads = local.quantized_bytes / b, 0.0 if delays else weight_grad_bytes(local)
    num_experts, fc1 = moe.num_experts / local.plan.layout.ep, local.num_fc1
    fc2_grads, fc1_grads = weight_grads / (1 + fc1), weight_grads * fc1 / (1 + fc1)
    num_inside = 5 if local.model.activation == "clamped swiglu" else 2  # saved inside of the activation
    if moe.bias:  # for its rows, and for the router's weights in fp32
        line.make(rows.gathered)
        line.pass_through(*[FP32 / b * rows.gathered] * 2)
        line.free(rows.gathered, rows.gathered)
    if _recomputes_activation(local):
        line.make(*_activation(rows))
    is_quantized = bool(low) and not local.has_adapters
    fc2_input = low * hidden if is_quantized and not recomputes else hidden
    fc2_input *= recomputes or "expert_product" in local.saved_inputs
    fc1_input = low * rows.gathered if is_quantized and "expert_rows" in local.saved_inputs else 0.0
    if low:
        # Gradients of one expert are quantized for both GEMMs. Those of the weights are stacked in the end.
        line.make(hidden, fc2_grads, low * rows.gathered if delays else 0.0)
        line.pass_through(2 * low * rows.gathered / num_experts)
        line.free(rows.gathered, 0.0 if delays else fc2_input)
        line.pass_through(fc2_grads)
        line.free(fc2_grads)
        line.replace(hidden, hidden)
    else:
        line.make(hidden, fc2_grads)
        line.free(0.0 if delays else rows.gathered, 0.0 if delays else fc2_input, fc2_grads)
    steps["expert_fc2"] = line.take_peak()
    line.make(fc2_grads if _reduces_together(local) else 0.0)
    # The router's weight; then the product and the activation.
    line.make(hidden)
    line.pass_through(*[FP32 / b * hidden] * 2)
    line.free(hidden, hidden)
    # Without a gate FC1's output is not saved, but the gradient of its positive part is there beside its own.
    line.make(2 * hidden)
    line.free(*([2 * hidden] + [hidden] * num_inside if fc1 == 2 else [hidden] * 3))
    steps["moe_act"] = line.take_peak()
    if low:
        line.make(rows.gathered, fc1_grads, fc1 * low * hidden if delays else 0.0)
        line.pass_through(2 * low * fc1 * hidden / num_experts)
        line.free(fc1 * hidden, 0.0 if delays else fc1_input)
        line.pass_through(fc1_grads)
        line.free(fc1_grads)
        line.make(rows.gathered)
    else:
        line.make(rows.gathered, fc1_grads)
    line.pass_through(local.expert_adapter_copies * rows.gathered)  # the adapters' part of the gradient of the rows
    steps["expert_fc1"] = line.take_peak()
    return steps


def _fused(line: Timeline, rows: MoeRows, delays: bool) -> None:
    """One function for both GEMMs, on given rows: the gradient of the activation before those of FC1's output and of
    the weights, and the activation once more."""
    local, hidden, weight_grads = rows.local, rows.hidden, 0.0 if delays else weight_grad_bytes(rows.local)
    adds = local.fuses_grad_accumulation
    line.make(hidden, 2 * hidden, hidden)
    line.free(hidden)
    line.make(weight_grads / 3)
    line.free(weight_grads / 3 if adds else 0.0, 0.0 if delays else hidden)
    line.make(2 * weight_grads / 3)
    line.free(2 * weight_grads / 3 if adds else 0.0)
    line.make(rows.gathered)
    if delays and rows.is_sorted:  # the same in the order in which the rows arrived; gradients of results stay
        line.free(2 * hidden)
        line.pass_through(rows.gathered)


def _in_place(line: Timeline, rows: MoeRows, delays: bool) -> float:
    """The same where kernels read tokens by index, and sum the gradients of rows into those of tokens."""
    local, hidden, weight_grads = rows.local, rows.hidden, weight_grad_bytes(rows.local)
    moe = local.model.moe
    assert moe is not None
    if local.quantized_bytes:
        _fused_fp8(line, rows, delays)
    elif delays:
        line.make(2 * hidden, hidden, rows.gathered)
    else:
        is_wide = moe.expert_dim / local.plan.layout.etp > WIDEST_IN_PLACE and weight_grads > 0
        adds, gathered = local.fuses_grad_accumulation, rows.gathered if is_wide else 0.0
        line.make(2 * hidden, hidden)
        made = 0.0 if adds and not is_wide else weight_grads
        line.make(gathered, made / 3)
        line.free(hidden, made / 3 if adds else 0.0)
        line.replace(gathered, gathered)
        line.make(2 * made / 3)
        line.free(2 * made / 3 if adds else 0.0)
        line.make(rows.gathered)
    line.make(rows.tokens)
    return line.take_peak()


def _fused_fp8(line: Timeline, rows: MoeRows, delays: bool) -> None:
    """The same in FP8: gradients are quantized along rows, and along columns for the weights."""
    local, hidden, low = rows.local, rows.hidden, rows.local.quantized_bytes / rows.local.element_bytes
    moe = local.model.moe
    weight_grads = 0.0 if delays or local.fuses_grad_accumulation else weight_grad_bytes(local)
    assert moe is not None
    padding = 1 + SCALE_ROWS * moe.num_experts / local.plan.layout.ep / (local.expert_rows * rows.fraction)
    columns = low * padding
    line.make(low * rows.gathered, columns * rows.gathered)
    line.make(hidden)
    line.free(low * rows.gathered)
    line.make(2 * low * hidden, 2 * columns * hidden, columns * hidden)
    line.free(hidden)
    line.make(weight_grads / 3)
    line.free(0.0 if delays else columns * (rows.gathered + hidden))
    line.make(2 * weight_grads / 3)
    line.free(0.0 if delays else 2 * columns * hidden)
    line.make(rows.gathered)
