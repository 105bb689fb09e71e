"""A pipeline rank in our own engine, beyond what its layers keep: states, the ends of the model, the fullest moment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from threefold.cost.kept import INDEX, Share, layer_kept
from threefold.cost.moments import backward_moment, forward_moment, gather_moment, loss_moment, reduce_moment
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer
from threefold.spec.params import dense_params, expert_params, mixer_params, shared_params

OWN = "threefold"
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
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
    grad = max(width, _STATE_BYTES[knobs.grad_dtype]) if layout.gpus > 1 else width  # alone, gradients are autograd's
    moments = 2 * _STATE_BYTES[knobs.optimizer_dtype]
    on_device = 1 - knobs.optimizer_offload
    terms = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for params, copies in ((dense, layout.dp * layout.cp), (experts, layout.edp)):
        shards = max(1, copies // layout.replicate)
        if params is experts and shards > 1:
            shards = min(shards, num_local(plan))  # parts are of whole experts: some ranks hold none
        if knobs.data_parallel != "zero1" and shards > 1:
            # Kept in parts and in fp32: their own master weights. The only microbatch finds no gradients yet.
            terms["weights"] += 4 * params / shards
            terms["gradients"] += 4 * params / shards if plan.num_microbatches > 1 else 0.0
            terms["optimizer"] += moments * params / shards * on_device
        else:
            terms["weights"] += width * params
            terms["gradients"] += grad * params
            terms["optimizer"] += (master + moments) * params / max(1, copies) * on_device
    return terms


def num_local(plan: Plan) -> int:
    """Routed experts of a rank."""
    return max(1, plan.model.num_experts // plan.layout.ep)


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


def own_moment(plan: Plan, held: Held, saved: dict[Layer, Terms], terms: Terms, skew: float) -> str:
    """The fullest of the moments in which most is kept; its bytes are added to the terms."""
    share = Share(plan, skew)
    layers = [*held.layers, *plan.model.mtp_depth * min(1, held.mtp)] or [Layer("none", "none")]
    last = layers[-1]
    moments = {"a forward": ("workspace", forward_moment(share, last))}
    again = _again(share, saved, layers)
    moments["a backward"] = ("recompute" if again else "workspace", backward_moment(share, last) + again)
    if held.loss or held.mtp:
        full, kept = loss_moment(share, held.loss + held.mtp)
        moments["the loss"] = ("logits", full)
        head = share.width * plan.model.dim * (plan.model.vocab / share.tp + share.s)
        moments["the loss's backward"] = ("logits", kept + head)
        term, size = moments["a backward"]
        moments["a backward"] = (term, size + kept)
    if plan.knobs.data_parallel != "zero1":
        _add_gathered(plan, held, share, last, moments, again)
    name, (term, size) = max(moments.items(), key=lambda row: row[1][1])
    terms[term] = terms.get(term, 0.0) + size
    return f"{name}, with all microbatches in flight"


def _again(share: Share, saved: dict[Layer, Terms], layers: Sequence[Layer]) -> float:
    """What the fullest layer makes again."""
    if not share.again:
        return 0.0
    plain = _plain(share)
    return max(sum(layer_kept(plain, one).values()) - sum(saved.get(one, {}).values()) for one in set(layers))


def _plain(share: Share) -> Share:
    """Without recompute."""
    return Share(replace(share.plan, knobs=replace(share.plan.knobs, recompute=())), share.skew)


def _add_gathered(
    plan: Plan, held: Held, share: Share, last: Layer, moments: dict[str, tuple[str, float]], again: float
) -> None:
    """FSDP: the weights of the unit at work, whole; a chunk's own stay so from its forward to its backward."""
    model, layout, b = plan.model, plan.layout, share.width
    table = b * model.vocab / layout.tp * model.dim if layout.dp * layout.cp // layout.replicate > 1 else 0.0
    ends = table * (held.embedding + (held.loss and not model.tied))
    experts = 0.0
    if model.moe and last.ffn == "moe" and layout.edp // layout.replicate > 1:
        experts = model.moe.num_experts * expert_params(model) / layout.ep / layout.etp
    whole = mixer_params(model, last) + (dense_params(model) if last.ffn == "dense" else shared_params(model))
    dense = b * whole / layout.tp if table else 0.0
    # Parts are of whole experts: with more ranks than experts the others' are padding.
    padded = experts * max(1.0, layout.edp / layout.replicate / num_local(plan))
    for name, (term, size) in list(moments.items()):
        at_work = {"a forward": dense, "a backward": dense + b * experts}.get(name, 0.0)
        moments[name] = (term, size + ends + at_work)
    if experts:
        # Of what the layer's experts keep nothing is there yet, or any more.
        rest = ends + dense + again - layer_kept(_plain(share), last).get("experts", 0.0)
        moments["a reduction"] = ("workspace", reduce_moment(share, experts, padded) + rest)
        moments["a gathering"] = ("workspace", gather_moment(share, experts, padded) + rest)
