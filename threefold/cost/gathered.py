"""FSDP in our own engine: the moments in which weights are gathered whole, and gradients reduced from whole.

Units are a layer's experts, the rest of the layer, and what of a chunk lies outside of layers (its root: the tables).
torch's `fully_shard` cuts the first dim of each weight: with more ranks than experts the parts of most are padding.
"""

from dataclasses import dataclass

from threefold.cost.share import FP32, Share
from threefold.plan.plan import Plan
from threefold.spec.model import Layer
from threefold.spec.params import dense_params, expert_params, mixer_params, norm_params, router_params, shared_params

Moments = dict[str, tuple[str, float]]  # name -> (memory term, bytes)


@dataclass(frozen=True)
class Units:
    """Elements of a rank's units, whole; 0 where nobody shares them."""

    root: float
    first: float  # of the root, what is reduced behind the loss
    layer: float
    experts: float
    padded: float  # experts, in equal parts
    shards: int  # of those parts


def num_local(plan: Plan) -> int:
    """Routed experts of a rank."""
    return max(1, plan.model.num_experts // plan.layout.ep)


def units(plan: Plan, layer: Layer, tables: int) -> Units:
    model, layout = plan.model, plan.layout
    root = first = rest = experts = padded = 0.0
    if layout.dp * layout.cp // layout.replicate > 1:
        table = model.vocab / layout.tp * model.dim
        root, first = tables * table, min(tables, 1) * table if _by_use(plan) else tables * table
        cut = mixer_params(model, layer) + (dense_params(model) if layer.ffn == "dense" else 0)
        whole = norm_params(model, layer)
        if layer.ffn == "moe":
            cut, whole = cut + shared_params(model), whole + router_params(model)
        rest = cut / layout.tp + whole
    shards = layout.edp // layout.replicate
    if model.moe and layer.ffn == "moe" and shards > 1:
        experts = model.moe.num_experts * expert_params(model) / layout.ep / layout.etp
        padded = experts * -(-num_local(plan) // shards) * shards / num_local(plan)
    return Units(root, first, rest, experts, padded, max(1, shards))


def _by_use(plan: Plan) -> bool:
    """torch 2.11 reduces what has a gradient; later ones (unless said, that is what runs) a unit as a whole."""
    parts = (plan.stack.torch or "").split(".")[:2]
    return len(parts) == 2 and all(map(str.isdigit, parts)) and tuple(map(int, parts)) <= (2, 11)


def add_gathered(moments: Moments, share: Share, of: Units, has_loss: bool, experts_kept: float, again: float) -> None:
    """`experts_kept` of the layer at work; `again`: what it makes again."""
    b = share.width
    always = b * (of.root + of.layer)
    # A reduction's input is there until the next one begins; that of the root comes first.
    reduced = FP32 * of.first if has_loss else 0.0
    narrow = 2 * of.experts if share.low and share.fused_experts else 0.0  # made for use, both sides of the products
    beside = {"a forward": always + b * of.padded, "a backward": always + b * of.padded + reduced + narrow}
    beside["a second forward"] = beside["a backward"]
    for name, (term, size) in list(moments.items()):
        moments[name] = (term, size + beside.get(name, b * of.root))
    if reduced:
        # The root is gathered once more, for its part at the other end of the model.
        moments["the loss's reduction"] = ("workspace", reduced + 2 * b * of.root)
    if of.experts:
        rows = b * share.model.dim * share.r
        repeated = bool(share.again & {"moe", "full"})
        biased = rows if share.model.moe and share.model.moe.bias else 0.0
        moving = 2 * rows + biased + reduced + again if repeated else rows + max(rows, reduced)
        moments["a gathering"] = ("workspace", always + 2 * b * of.padded + narrow + moving)
        copied = max(b * of.experts, FP32 * of.padded / of.shards + b * of.experts / 3)
        moments["a reduction"] = ("workspace", always + FP32 * of.padded + copied + again - experts_kept)


def table_reduction(share: Share, of: Units) -> float:
    """Behind a microbatch's backward, at the first stage: the table's gradient, and once more in fp32 with its part."""
    layout = share.plan.layout
    return of.root * (share.width + FP32 + FP32 / max(1, layout.dp * layout.cp // layout.replicate))
