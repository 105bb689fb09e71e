"""A pipeline rank in our own engine, beyond what its layers keep: states, and the ends of the model."""

from collections.abc import Sequence

from threefold.cost.gathered import num_local, num_tables, units
from threefold.cost.place import NOTHING, Held, Place, Terms, chunk_layers
from threefold.cost.share import FP32, INDEX, Share
from threefold.plan.plan import Plan
from threefold.spec.flops import padded_vocab
from threefold.spec.model import Layer, MlaSpec
from threefold.spec.params import dense_params, expert_params, mixer_params, shared_params

OWN = "threefold"
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Bytes of an element of a weight in a narrow format, scales included.
_NARROW_WEIGHT = {"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def own_states(plan: Plan, dense: float, experts: float, shared: float, tables: float) -> Terms:
    """Weights, gradients and optimizer states of so many parameters outside and inside the experts; `shared` of the
    first are held by two pipeline ranks, `tables` are the vocabulary's, which Muon leaves to AdamW."""
    layout, knobs = plan.layout, plan.knobs
    width = 4 if knobs.precision == "fp32" else 2
    master = 4 if width == 2 and knobs.master_weights else 0
    summed = layout.gpus > 1 or plan.num_microbatches > 1  # else gradients are autograd's
    grad = max(width, _STATE_BYTES[knobs.grad_dtype]) if summed else width
    moment = _STATE_BYTES[knobs.optimizer_dtype]
    on_device = 1 - knobs.optimizer_offload
    terms = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    once = layout.dp * layout.cp
    kinds = ((dense - shared, once, 1, tables - shared), (shared, once, 2, shared), (experts, layout.edp, 1, 0.0))
    for number, (params, copies, stages, rows) in enumerate(kinds):
        moments = moment * (params + rows if plan.job.optimizer == "muon" else 2 * params)
        shards = max(1, copies // layout.replicate)
        if knobs.data_parallel != "zero1" and shards > 1:
            if number == len(kinds) - 1:
                shards = min(shards, num_local(plan))  # parts are of whole experts: some ranks hold none
            # Kept in parts and in fp32: their own master weights.
            terms["weights"] += 4 * params / shards
            terms["gradients"] += 4 * params / shards
            terms["optimizer"] += moments / shards * on_device
        else:
            terms["weights"] += width * params
            terms["gradients"] += grad * params
            terms["optimizer"] += (master * params + moments) / max(1, copies * stages) * on_device
    return terms


def shared_table(plan: Plan, held: Held) -> float:
    """Of the embedding, where another stage has it too: for multi-token prediction, or as the head."""
    ends = (held.embedding, held.mtp > 0 or (held.loss and plan.model.tied))
    elsewhere = any(chunk.mtp or (chunk.loss and plan.model.tied) for chunk in plan.chunks)
    if plan.layout.pp == 1 or all(ends) or not any(ends) or not elsewhere:
        return 0.0
    return plan.model.vocab / plan.layout.tp * plan.model.dim


def own_dense(plan: Plan, held: Held, dense: float) -> float:
    """Parameters outside the experts, of `dense` as Megatron has them: vocabularies are not padded here, and tensor
    parallel leaves more whole (MLA's way down, what joins MTP's)."""
    model, layout, spec = plan.model, plan.layout, plan.model.attention
    depths = min(held.mtp, 1) if model.mtp_shared else held.mtp
    padding = num_tables(plan, held) * (padded_vocab(model, layout.tp) - model.vocab) / layout.tp * model.dim
    whole = depths * 2.0 * model.dim**2
    if isinstance(spec, MlaSpec):
        num = sum(layer.mixer == "attention" for layer in [*held.layers, *model.mtp_depth * depths])
        whole += num * model.dim * ((spec.q_rank or 0) + spec.kv_rank + spec.rope_dim)
    return dense - padding + whole * (1 - 1 / layout.tp)


def own_narrow(plan: Plan, held: Held, experts: float) -> float:
    """Weights in a narrow format, once for each side of a product; none are kept of weights that are gathered."""
    if not plan.low_precision or plan.knobs.data_parallel != "zero1":
        return 0.0
    model, params = plan.model, 0.0
    for layer in [*held.layers, *plan.model.mtp_depth * min(1, held.mtp)]:
        params += mixer_params(model, layer) + (dense_params(model) if layer.ffn == "dense" else shared_params(model))
    return 2 * _NARROW_WEIGHT.get(plan.knobs.precision, 1.0) * (params / plan.layout.tp + experts)


def late_gradients(share: Share, held: Held, whole: float) -> float:
    """Of `whole`, those that no buffer was made for."""
    plan, model, layout = share.plan, share.model, share.plan.layout
    if layout.gpus == 1:
        return whole if plan.num_microbatches == 1 else 0.0
    if plan.knobs.data_parallel == "zero1":
        return 0.0
    shards = max(1, layout.edp // layout.replicate)
    num = sum(layer.ffn == "moe" for chunk in held.chunks for layer in chunk_layers(plan, chunk))
    experts = FP32 * num * model.num_experts / layout.ep / layout.etp * (expert_params(model) if num else 0)
    experts /= min(shards, num_local(plan))
    dense = whole - experts if layout.dp * layout.cp > layout.replicate else 0.0
    return dense + (experts if shards > 1 else 0.0)


def head_gradient(share: Share, held: Held) -> float:
    plan = share.plan
    if not held.loss or (plan.layout.gpus > 1 and plan.knobs.data_parallel == "zero1"):
        return 0.0
    if plan.layout.gpus == 1:
        return share.width * share.model.vocab * share.model.dim if plan.num_microbatches == 1 else 0.0
    of = units(plan, held, Place(NOTHING, (), None, True, False, 0.0))
    return FP32 * of.first / of.copies


def own_activations(
    plan: Plan,
    stage: int,
    held: Held,
    saved: dict[Layer, Terms],
    terms: Terms,
    flights: Sequence[int],
    back: Sequence[int] | None = None,
) -> None:
    """Of every microbatch in flight, and the tokens of all of them. `back`: how many each chunk is done with, if that
    is known."""
    share = Share(plan)
    keep = 1.0
    if plan.knobs.activation_offload_layers and held.layers:
        keep = max(0.0, 1 - plan.knobs.activation_offload_layers / len(held.layers))
    b, dim, t = share.width, plan.model.dim, share.t
    for chunk, count in zip(held.chunks, flights, strict=False):
        for layer in (inside := chunk_layers(plan, chunk)):
            for name, value in saved[layer].items():
                terms[name] = terms.get(name, 0.0) + value * count * keep
        terms["attention"] = terms.get("attention", 0.0) + _tables(share, inside) * count
        # The next token's embedding and the hidden state, their norms side by side, and the last norm of a depth.
        first = b * dim * t * (chunk.mtp + (chunk.embedding and bool(inside)))
        ends = chunk.mtp * b * dim * t * 5 + (b * dim * t if chunk.loss else 0.0) - first
        terms["norms"] = terms.get("norms", 0.0) + ends * count
        terms["embedding"] = terms.get("embedding", 0.0) + first * count
        if chunk.embedding:
            terms["embedding"] += 2 * INDEX * share.s * count
    terms["norms"] = terms.get("norms", 0.0) + borders(plan, stage, held, flights, back) * b * dim * t
    whole = plan.job.micro_batch * plan.job.seq_len
    terms["embedding"] = terms.get("embedding", 0.0) + 2 * INDEX * whole * max(1, plan.num_microbatches)


def _tables(share: Share, layers: Sequence[Layer]) -> float:
    """Of the rotary embedding: cosine and sine in fp32, which all layers of a kind share."""
    kinds = {"attention": share.model.attention, "window": share.model.local_attention}
    specs = [kinds[mixer] for mixer in {layer.mixer for layer in layers} & set(kinds)]
    dims = sum(s.rope_dim if isinstance(s, MlaSpec) else s.head_dim * s.rope_fraction for s in specs if s)
    return FP32 * dims * share.s


def borders(plan: Plan, stage: int, held: Held, flights: Sequence[int], back: Sequence[int] | None) -> float:
    """Hidden states and their gradients that were sent and not yet asked about, at most one a pipeline rank and border;
    one on its way."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    if layout.pp == 1:
        return 0
    sent, most = 0, min(layout.pp, count)
    for number, chunk in enumerate(held.chunks):
        done = back[number] if back else count if layout.vpp > 1 else 0
        if not chunk.loss:
            sent += min(most, flights[number] + done) if back else most
        if not chunk.embedding:
            sent += min(most, done)
    return sent + (0 if stage == 0 and layout.vpp == 1 else 1)
