"""A pipeline rank in our own engine, beyond what its layers keep: states, the ends of the model, the fullest moment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from threefold.cost.gathered import add_gathered, num_local, table_reduction, units
from threefold.cost.kept import layer_again, layer_kept
from threefold.cost.moments import backward_moment, forward_moment, loss_moment
from threefold.cost.share import FP32, INDEX, Share
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.flops import padded_vocab
from threefold.spec.model import Layer, MlaSpec
from threefold.spec.params import dense_params, mixer_params, shared_params
from threefold.units import MIB

OWN = "threefold"
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Bytes of an element of a weight in a narrow format, scales included.
_NARROW_WEIGHT = {"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
LIBRARIES = 2 * 32 * MIB  # of cuBLAS on Hopper, for the forward and for the backward
Terms = dict[str, float]


@dataclass(frozen=True, slots=True)
class Held:
    """What a pipeline rank holds."""

    chunks: tuple[Chunk, ...]
    layers: tuple[Layer, ...]
    embedding: bool
    mtp: int
    loss: bool


def own_states(plan: Plan, dense: float, experts: float) -> Terms:
    """Weights, gradients and optimizer states of so many parameters outside and inside the experts."""
    layout, knobs = plan.layout, plan.knobs
    width = 4 if knobs.precision == "fp32" else 2
    master = 4 if width == 2 else 0
    summed = layout.gpus > 1 or plan.num_microbatches > 1  # else gradients are autograd's
    grad = max(width, _STATE_BYTES[knobs.grad_dtype]) if summed else width
    moments = 2 * _STATE_BYTES[knobs.optimizer_dtype]
    on_device = 1 - knobs.optimizer_offload
    terms = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for params, copies in ((dense, layout.dp * layout.cp), (experts, layout.edp)):
        shards = max(1, copies // layout.replicate)
        if knobs.data_parallel != "zero1" and shards > 1:
            if params is experts:
                shards = min(shards, num_local(plan))  # parts are of whole experts: some ranks hold none
            # Kept in parts and in fp32: their own master weights.
            terms["weights"] += 4 * params / shards
            terms["gradients"] += 4 * params / shards
            terms["optimizer"] += moments * params / shards * on_device
        else:
            terms["weights"] += width * params
            terms["gradients"] += grad * params
            terms["optimizer"] += (master + moments) * params / max(1, copies) * on_device
    return terms


def own_dense(plan: Plan, held: Held, dense: float) -> float:
    """Parameters outside the experts, of `dense` as Megatron has them: vocabularies are not padded here, and tensor
    parallel leaves more whole (MLA's way down, what joins MTP's)."""
    model, layout, spec = plan.model, plan.layout, plan.model.attention
    depths = min(held.mtp, 1) if model.mtp_shared else held.mtp
    tables = (held.embedding or held.mtp > 0) + (not model.tied and (held.loss or held.mtp > 0))
    padding = tables * (padded_vocab(model, layout.tp) - model.vocab) / layout.tp * model.dim
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


def own_activations(
    plan: Plan, stage: int, held: Held, saved: dict[Layer, Terms], terms: Terms, flights: Sequence[int]
) -> None:
    """Of every microbatch in flight, and the tokens of all of them."""
    share, layers, layout = Share(plan), plan.model.layers, plan.layout
    keep = 1.0
    if plan.knobs.activation_offload_layers and held.layers:
        keep = max(0.0, 1 - plan.knobs.activation_offload_layers / len(held.layers))
    b, dim, t = share.width, plan.model.dim, share.t
    for chunk, count in zip(held.chunks, flights, strict=False):
        for layer in [*(layers[i] for i in chunk.layers), *(plan.model.mtp_depth * chunk.mtp)]:
            for name, value in saved[layer].items():
                terms[name] = terms.get(name, 0.0) + value * count * keep
        # The next token's embedding and the hidden state, their norms side by side, and the last norm of a depth.
        ends = chunk.mtp * b * dim * t * 5 + (b * dim * t if chunk.loss else 0.0)
        terms["norms"] = terms.get("norms", 0.0) + ends * count
        if chunk.embedding:
            terms["embedding"] = terms.get("embedding", 0.0) + 2 * INDEX * share.s * count
    if layout.pp > 1:
        terms["norms"] = terms.get("norms", 0.0) + _borders(plan, stage, held) * b * dim * t
    whole = plan.job.micro_batch * plan.job.seq_len
    terms["embedding"] = terms.get("embedding", 0.0) + 2 * INDEX * whole * max(1, plan.num_microbatches)


def _borders(plan: Plan, stage: int, held: Held) -> float:
    """Hidden states that were sent and not yet asked about, at most one a pipeline rank and border; one on its way."""
    layout = plan.layout
    last = stage == layout.pp - 1 and layout.vpp == 1
    first = stage == 0 and layout.vpp == 1
    sent = min(layout.pp, max(1, plan.num_microbatches))
    return (0 if last else sent) * len(held.chunks) + (0 if first else 1)


def own_moment(
    plan: Plan, held: Held, saved: dict[Layer, Terms], terms: Terms, flights: Sequence[int], skew: float
) -> str:
    """The fullest of the moments in which most is kept; its bytes are added to the terms."""
    share = Share(plan, skew)
    layers = [*held.layers, *plan.model.mtp_depth * min(1, held.mtp)] or [Layer("none", "none")]
    last = layers[-1]
    moments = {"a forward": ("workspace", forward_moment(share, last))}
    again = _again(share, saved, layers)
    moments["a backward"] = ("recompute" if again else "workspace", backward_moment(share, last) + again)
    if share.again & {"moe", "full"}:
        moments["a second forward"] = (
            "recompute",
            forward_moment(share, last) + share.width * share.model.dim * share.t + again,
        )
    if held.loss or held.mtp:
        full, kept = loss_moment(share, held.loss + held.mtp)
        moments["the loss"] = ("logits", full)
        head = share.width * plan.model.dim * (plan.model.vocab / share.tp + share.s)
        moments["the loss's backward"] = ("logits", kept + head)
    first = 0.0
    if plan.knobs.data_parallel != "zero1":
        tables = held.embedding + (held.loss and not plan.model.tied)
        of, kept = units(plan, last, tables), layer_kept(_plain(share), last).get("experts", 0.0)
        add_gathered(moments, share, of, held.loss, kept, again)
        first = FP32 * of.first if held.loss else 0.0
        if held.embedding and plan.layout.pp > 1:
            done = sum(sum(saved[plan.model.layers[i]].values()) for i in held.chunks[0].layers)
            moments["the embedding's reduction"] = ("workspace", table_reduction(share, of) - done)
    if plan.num_microbatches <= max(flights) and (plan.layout.gpus == 1 or plan.knobs.data_parallel != "zero1"):
        _without_gradients(share, held, saved, terms, moments, first)
    name, (term, size) = max(moments.items(), key=lambda row: row[1][1])
    terms[term] = terms.get(term, 0.0) + size
    if share.fused:
        terms["workspace"] = terms.get("workspace", 0.0) + LIBRARIES
    return f"{name}, with all microbatches in flight"


_LATE = ("a backward", "a second forward", "a gathering", "a reduction")


def _without_gradients(
    share: Share,
    held: Held,
    saved: dict[Layer, Terms],
    terms: Terms,
    moments: dict[str, tuple[str, float]],
    first: float,
) -> None:
    """Gradients come with the only backward: either all layers' tensors are there, or all gradients but one layer's,
    and its tensors. `first`: what is reduced at the first layer of the backward, and gone at the last."""
    others: Terms = {}
    for layer in held.layers[1:]:
        for name, size in saved[layer].items():
            others[name] = others.get(name, 0.0) + size
    grads = terms["gradients"] * (1 - 1 / max(1, len(held.layers)))
    late = {name: (term, size - first) for name, (term, size) in moments.items() if name in _LATE}
    head = share.width * share.model.vocab * share.model.dim if share.plan.layout.gpus == 1 and held.loss else 0.0
    early = max(size for _, size in moments.values()) + head
    if share.plan.layout.pp > 1 or early > max(size for _, size in late.values()) + grads - sum(others.values()):
        terms["gradients"] = head
        return
    moments.clear()
    moments.update(late)
    terms["gradients"] = grads
    for name, size in others.items():
        terms[name] -= size


def _again(share: Share, saved: dict[Layer, Terms], layers: Sequence[Layer]) -> float:
    """What the fullest layer makes again."""
    if not share.again:
        return 0.0
    plain = _plain(share)
    made = {one: sum(layer_again(share, one, plain).values()) for one in set(layers)}
    return max(made[one] - sum(saved.get(one, {}).values()) for one in made)


def _plain(share: Share) -> Share:
    """Without recompute."""
    return Share(replace(share.plan, knobs=replace(share.plan.knobs, recompute=())), share.skew)
