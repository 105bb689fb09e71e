"""FSDP in our own engine: the moments in which weights are gathered whole, and gradients reduced from whole.

Units are a layer's experts, the rest of the layer, and what of a chunk lies outside of layers (its root: the tables).
A unit is gathered into one buffer and copied out of it. In a forward the buffer goes when the next unit is copied; in a
backward at once, while the next unit's is already filled. A reduction's input is there until the next one begins.

torch's `fully_shard` cuts the first dim of each weight: with more ranks than experts the parts of most are padding.
"""

from dataclasses import dataclass, replace

from threefold.cost.moments import embedding_moment
from threefold.cost.place import Held, Moment, Place, Terms
from threefold.cost.share import FP32, Share
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer, MlaSpec
from threefold.spec.params import dense_params, expert_params, mixer_params, norm_params, router_params, shared_params


@dataclass(frozen=True)
class Units:
    """Elements of a rank's units, whole; 0 where nobody shares them."""

    root: float
    first: float  # of the root, what is reduced behind the loss
    layer: float
    experts: float
    padded: float  # experts, in equal parts
    shards: int  # of those parts
    copies: int = 1  # parts of all others
    ahead: float = 0.0  # of the layer that comes next in the backward
    reduced: float = 0.0  # what was reduced last before the layer's backward
    fed: float = 0.0  # of the layer, behind the mixer's core: their gradients wait for the rest
    waiting: float = 0.0  # of the root, whose gradients multi-token prediction has made: they wait for the rest


def num_local(plan: Plan) -> int:
    """Routed experts of a rank."""
    return max(1, plan.model.num_experts // plan.layout.ep)


def _units(plan: Plan, layer: Layer, tables: int, depths: int) -> Units:
    """With so many tables of the vocabulary, and depths of multi-token prediction."""
    model, layout = plan.model, plan.layout
    root = first = experts = padded = 0.0
    copies, shards = layout.dp * layout.cp // layout.replicate, layout.edp // layout.replicate
    if copies > 1:
        table = model.vocab / layout.tp * model.dim
        root = tables * table + depths * 2 * model.dim**2
        first = min(tables, 1) * table if _by_use(plan) else root
    if model.moe and layer.ffn == "moe" and shards > 1:
        experts = model.moe.num_experts * expert_params(model) / layout.ep / layout.etp
        padded = experts * -(-num_local(plan) // shards) * shards / num_local(plan)
    return Units(root, first, _rest(plan, layer), experts, padded, max(1, shards), max(1, copies))


def _last_unit(plan: Plan, layer: Layer | None) -> float:
    """Of a layer, which is the first in its backward to be gathered and the last to be reduced."""
    return 0.0 if layer is None else _rest(plan, layer) or _units(plan, layer, 0, 0).padded


def units(plan: Plan, held: Held, place: Place) -> Units:
    """As they are met in the backward of a layer."""
    depths = min(held.mtp, 1) if plan.model.mtp_shared else held.mtp
    of = _units(plan, place.layer, num_tables(plan, held), depths)
    first = of.first if held.loss else 0.0
    behind = place.behind[0] if place.behind else None
    return replace(
        of,
        first=first,
        ahead=_last_unit(plan, place.ahead),
        reduced=first if place.closes else _last_unit(plan, behind),
        fed=_fed(plan, place.layer) if of.layer else 0.0,
        waiting=of.root - plan.model.vocab / plan.layout.tp * plan.model.dim if of.root and place.mtp else 0.0,
    )


def num_tables(plan: Plan, held: Held) -> int:
    """Of the vocabulary: multi-token prediction has both, wherever it is."""
    head = not plan.model.tied and (held.loss or held.mtp > 0)
    return (held.embedding or held.mtp > 0) + head


def _rest(plan: Plan, layer: Layer | None) -> float:
    """A layer but for its experts."""
    model, layout = plan.model, plan.layout
    if layer is None or layout.dp * layout.cp // layout.replicate <= 1:
        return 0.0
    cut = mixer_params(model, layer) + (dense_params(model) if layer.ffn == "dense" else 0)
    whole = norm_params(model, layer)
    if layer.ffn == "moe":
        cut, whole = cut + shared_params(model), whole + router_params(model)
    return cut / layout.tp + whole


def _fed(plan: Plan, layer: Layer) -> float:
    """A layer's weights behind the core of its mixer, but for experts."""
    model = plan.model
    spec = model.attention if layer.mixer == "attention" else model.local_attention
    if layer.mixer not in ("attention", "window") or spec is None:
        return 0.0
    values = spec.num_heads * (spec.v_dim if isinstance(spec, MlaSpec) else spec.head_dim)
    ffn = dense_params(model) if layer.ffn == "dense" else shared_params(model) if layer.ffn == "moe" else 0
    return (values * model.dim + ffn) / plan.layout.tp


def _by_use(plan: Plan) -> bool:
    """torch 2.11 reduces what has a gradient; later ones (unless said, that is what runs) a unit as a whole."""
    parts = (plan.stack.torch or "").split(".")[:2]
    return len(parts) == 2 and all(map(str.isdigit, parts)) and tuple(map(int, parts)) <= (2, 11)


def beside(share: Share, of: Units) -> dict[str, float]:
    """What is gathered and reduced in the moments of a layer."""
    b = share.width
    always = b * (of.root + of.layer)
    held = b * of.padded + narrow_copies(share, of)
    reduced, waiting = FP32 * of.reduced, b * of.waiting
    return {
        "a forward": always + (b * of.padded or b * of.layer),
        "a second forward": always + held + reduced + waiting,
        "a backward": always + held + reduced + waiting + b * of.ahead,
        "a mixer's backward": always + waiting + b * (of.ahead + of.fed) + (FP32 * of.padded or reduced),
    }


def narrow_copies(share: Share, of: Units) -> float:
    """Made for use, both sides of the products."""
    return 2 * of.experts if share.low and share.fused_experts else 0.0


def around_experts(share: Share, of: Units, place: Place, kept: float, again: float, gone: Terms) -> list[Moment]:
    """`kept` of the experts of the layer at work; `again`: what it makes again."""
    if not of.experts:
        return []
    b = share.width
    always, rows = b * (of.root + of.layer), b * share.model.dim * share.r
    biased = share.model.moe is not None and share.model.moe.bias
    # Rows as they came and results; with a bias also that, weighted, and the sum.
    moving = rows * (4 if biased else 2)
    gathered = always + 2 * b * of.padded + narrow_copies(share, of)
    before = gathered + FP32 * of.reduced + b * of.waiting
    back: Terms = {"workspace": before + rows}
    if share.again & {"moe", "full"}:
        back = {"workspace": before + moving, "recompute": again}
    copied = max(b * of.experts, FP32 * of.padded / of.shards + b * of.experts / 3)
    reduction = always + b * (of.ahead + of.waiting) + FP32 * of.padded + copied - kept
    reducing = {"workspace": reduction, "recompute": again}
    return [
        Moment("a gathering", "forward", {"workspace": gathered, "dispatch": moving}, gone),
        Moment("a gathering", "backward", back, gone, place.done, after_head=True),
        Moment("a reduction", "backward", reducing, gone, place.done, after_head=True),
    ]


def around_root(share: Share, of: Units, chunk: Chunk, kept: Terms) -> list[Moment]:
    """`kept` of a microbatch in the chunk."""
    b, layout = share.width, share.plan.layout
    found = []
    if chunk.loss and of.first:
        # The root is gathered once more, for its part at the other end of the model.
        size = {"workspace": FP32 * of.first + 2 * b * of.root}
        found.append(Moment("the loss's reduction", "backward", size, after_head=True))
    if chunk.embedding and layout.pp > 1:
        # Behind a microbatch's backward: the table's gradient, and once more in fp32 with its part.
        size = {"workspace": of.root * (b + FP32 + FP32 / of.copies)}
        found.append(Moment("the embedding's reduction", "backward", size, kept, 1.0))
        size = {"workspace": b * of.root + embedding_moment(share, False) + FP32 * (of.layer or of.padded)}
        found.append(Moment("the embedding's backward", "backward", size, kept, 1.0))
        # A backward leaves it in parts. Interleaved, another backward may be next; else a forward is.
        size = {"workspace": b * (2 * of.root + of.layer)}
        found.append(Moment("the embedding's gathering", "backward", size, {} if layout.vpp > 1 else kept))
    return found
