"""What waits for gradients of weights in our own engine, where these come later than those of what went in.

A product leaves its input and the gradient of its output (`engine/pipeline/delay.py`); all else that a layer keeps has
gone. Recompute changes nothing: what it made is what waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from threefold.cost.kept import BLOCK
from threefold.cost.place import chunk_layers
from threefold.cost.share import FP32, Share
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, Layer, MlaSpec


def splits_backward(plan: Plan) -> bool:
    """Sharded weights have gone again by then: their gradients do not wait."""
    return plan.layout.pipeline_schedule == "zero-bubble" and plan.knobs.data_parallel == "zero1"


@dataclass(frozen=True, slots=True)
class Waits:
    """Of a layer: of its mixer, its experts, and the rest of its feed-forward part."""

    mixer: float = 0.0
    experts: float = 0.0
    dense: float = 0.0

    @property
    def feed(self) -> float:
        return self.experts + self.dense

    @property
    def whole(self) -> float:
        return self.mixer + self.feed


NO_WAITS = Waits()


def layer_waits(share: Share, layer: Layer) -> Waits:
    model, moe = share.model, share.model.moe
    enters = share.s if share.gathers else share.t
    mixer = _mixer(share, layer)
    if layer.ffn == "dense":
        return Waits(mixer, dense=_gated(share, model.dense_dim / share.tp * share.s, enters))
    if layer.ffn != "moe" or moe is None:
        return Waits(mixer)
    hidden, shared = moe.expert_dim / share.plan.layout.etp, 0.0
    ends = share.t if share.in_one else share.r
    experts = _gated(share, hidden * share.r, ends)
    if share.low and share.fused_experts:  # gradients too, by columns of 128 rows
        padded = share.r + BLOCK * moe.num_experts / share.plan.layout.ep
        experts = (share.low * (model.dim + hidden) + _made(share) * (model.dim + 2 * hidden)) * padded
    if moe.shared_width:
        shared = _gated(share, moe.shared_width / share.tp * share.s, enters)
        shared += share.input * model.dim * share.t if moe.shared_gate and share.gathers else 0.0
    return Waits(mixer, experts, shared)


def _gated(share: Share, hidden: float, tokens: float) -> float:
    """Of three products: what they read, the first two the same, and the gradients of what they made."""
    ends = share.model.dim * tokens
    return share.input * (ends + hidden) + _made(share) * (2 * hidden + ends)


def _made(share: Share) -> float:
    """Bytes of an element of a gradient; in a narrow format its scales are of rows."""
    return share.low + FP32 / BLOCK if share.low else share.width


def chunk_waits(share: Share, chunk: Chunk, waits: Mapping[Layer, Waits]) -> float:
    """`waits` of each kind of layer. Multi-token prediction joins two states of a token."""
    joined = (2 * share.input + _made(share)) * share.model.dim * share.t * chunk.mtp
    return sum(waits[layer].whole for layer in chunk_layers(share.plan, chunk)) + joined


def _mixer(share: Share, layer: Layer) -> float:
    """Read by the first products, the gradients of what they made; the same of the last one, which reads what the
    kernel left, as that left it."""
    model, s, t, dim = share.model, share.s, share.t, share.model.dim
    i, b, g = share.input, share.width, _made(share)
    spec = model.attention if layer.mixer == "attention" else model.local_attention
    if layer.mixer == "delta" and model.delta:
        values = model.delta.values / share.tp
        made = 2 * (model.delta.keys + model.delta.num_v_heads) / share.tp + 2 * values
        return (i * (dim + values) + g * (made + dim)) * s
    if layer.mixer not in ("attention", "window") or spec is None:
        return 0.0
    if isinstance(spec, GqaSpec):
        q, kv = spec.q_dim / share.tp, max(1.0, spec.num_kv_heads / share.tp) * spec.head_dim
        left = i if spec.gated or not share.fused else b
        return (i * dim + left * q + g * ((2 if spec.gated else 1) * q + 2 * kv + dim)) * s
    assert isinstance(spec, MlaSpec)
    q_rank, heads = spec.q_rank or 0, spec.num_heads / share.tp
    low = q_rank + spec.kv_rank + (spec.rope_dim if share.gathers else 0) + (0 if q_rank or not share.gathers else dim)
    up = i * low + g * heads * (spec.qk_dim + spec.nope_dim + spec.v_dim)
    down = i * dim + g * (q_rank + spec.kv_rank + spec.rope_dim)
    return (up + b * heads * spec.v_dim + g * dim) * s + down * t


def weight_moment(share: Share, layer: Layer) -> float:
    """At a layer's experts, behind which nothing waits any more, above what waits: FC2's gradients, or FC1's when what
    FC2's were made of has gone."""
    model, moe, layout = share.model, share.model.moe, share.plan.layout
    if layer.ffn != "moe" or moe is None:
        return share.width * model.dense_dim / share.tp * model.dim if layer.ffn == "dense" else 0.0
    hidden = moe.expert_dim / layout.etp
    second = share.width * hidden * model.dim * moe.num_experts / layout.ep
    if share.low and not share.fused_experts:  # each expert's by itself, then all together
        return 4 * second
    used = share.width * (model.dim * (share.t if share.in_one else share.r) + hidden * share.r)
    return max(second, 2 * second - used)


def split_moment(share: Share, layer: Layer) -> float:
    """In the feed-forward part of a layer, as `backward_moment`, but that no weight gets its gradient, and what went
    into the last product and the gradient of what came out of it stay."""
    b, model, moe = share.width, share.model, share.model.moe
    if layer.ffn == "dense":
        own = b * model.dense_dim / share.tp * share.s * (share.mlp_at_once if share.again & {"mlp", "full"} else 1)
        return b * model.dim * share.s + (3 if share.fused else 2) * own
    assert moe is not None
    r = share.r * share.at_once
    rows, inner = b * model.dim * r, b * moe.expert_dim / share.plan.layout.etp * r
    if share.fused_experts:
        first, last = rows + 4 * inner, 2 * rows + 3 * inner
        if share.low:  # gradients of rows by columns, beside the rows
            turned = rows / b
            first, last = rows + turned + (b + 5) * inner / b, 2 * rows + turned + 3 * inner / b
        return max(first, last) + (b * model.dim * share.t if share.in_one else 0.0)
    # Rows on their way back; the activation, in fp32 for the router's weights; what FC1 makes.
    act = (1 + 2 * FP32 / b if share.narrow else 2) * inner
    return max(2 * rows, rows + inner + act, 2 * rows - 2 * inner)
