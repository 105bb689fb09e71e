"""What of a layer our own engine keeps on the host: bytes on one rank for one microbatch, by memory term.

Counted tensor by tensor, as in `kept.py`. One that several modules keep leaves the device when all of them send it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from threefold.cost.kept import (
    entering,
    experts,
    in_fp32,
    mixer,
    mixer_reads_norm,
    mla_low,
    mla_up,
    normed,
    output_apart,
)
from threefold.cost.place import Terms, added, of_layer
from threefold.cost.share import FP32, Share
from threefold.spec.model import GqaSpec, Layer, MlaSpec
from threefold.units import MIB

LEAST = MIB  # less stays on a GPU
_MIXER = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
_FUSED = "fused_group_mlp"
_INSIDE = ("expert_fc1", "moe_act", "expert_fc2")  # all of which it sends; the last has no name of its own
SENDERS = (*reversed(_INSIDE), _FUSED)  # of the experts, as the backward comes to them
_LAST = frozenset({"attn_norm", "qkv_linear"})  # to which the backward comes behind attention


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor, or some alike, and who keeps it."""

    size: float
    term: str
    by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """Of a layer, by term, up to the end of its mixer and behind; who has sent it."""

    mixer: Terms = field(default_factory=dict)
    feed: Terms = field(default_factory=dict)
    by: frozenset[str] = frozenset()

    @property
    def terms(self) -> Terms:
        return added((self.mixer, self.feed))

    @property
    def whole(self) -> float:
        return sum(self.mixer.values()) + sum(self.feed.values())

    @property
    def asked(self) -> bool:
        """Whether the backward wants something of it before attention's is over."""
        return not self.by <= _LAST


NONE = Sent()


def layer_sent(share: Share, layer: Layer) -> Sent:
    share = of_layer(share, layer)
    names = set(share.plan.knobs.activation_offload)
    if not names or "full" in share.again:
        return NONE
    if _FUSED in names:
        names |= {*_INSIDE}
    least = LEAST if share.fused else 1
    gone = [kept for kept in _layer(share, layer) if kept.size >= least and names.issuperset(kept.by)]
    sides: tuple[Terms, Terms] = ({}, {})
    for kept in gone:
        side = sides[kept.by[0] not in _MIXER]
        side[kept.term] = side.get(kept.term, 0.0) + kept.size
    return Sent(*sides, frozenset(name for kept in gone for name in kept.by))


def _layer(share: Share, layer: Layer) -> Iterator[Kept]:
    stream = normed(share, share.model.dim) * share.t
    if layer.mixer != "none":
        yield Kept(stream, "norms", ("attn_norm",))
        if mixer_reads_norm(share, layer):
            yield Kept(share.input * share.model.dim * share.t, "norms", ("qkv_linear",))
        yield from _mixer(share, layer)
    if layer.ffn != "none":
        yield Kept(stream, "norms", ("mlp_norm",))
    if layer.ffn == "moe" and "moe" not in share.again:
        yield from _experts(share)


def _mixer(share: Share, layer: Layer) -> Iterator[Kept]:
    model, spec = share.model, share.model.attention if layer.mixer == "attention" else share.model.local_attention
    if layer.mixer == "delta" and model.delta:
        last = 0.0 if "gdn_norm_out" in share.again else share.width * model.delta.values / share.tp * share.s
        yield _attention(entering(share), "qkv_linear")
        yield _attention(mixer(share, layer) - entering(share) - last, "core_attn")
        yield _attention(last, "attn_proj")
    elif layer.mixer in ("attention", "window") and isinstance(spec, MlaSpec):
        yield _attention(mla_low(share, spec), "qkv_linear")
        if "mla_up_proj" not in share.again:
            yield _attention(mla_up(share, spec), "core_attn")
        yield from _core(share, spec, spec.num_heads * spec.v_dim / share.tp)
    elif layer.mixer in ("attention", "window") and isinstance(spec, GqaSpec):
        yield _attention(entering(share), "qkv_linear")
        yield from _heads(share, spec)
        yield from _core(share, spec, spec.q_dim / share.tp)


def _heads(share: Share, spec: GqaSpec) -> Iterator[Kept]:
    """Queries with their gate, and keys, before their norms; those ready to attend, and values."""
    b, s, head = share.width, share.s, spec.head_dim
    q, kv = spec.q_dim / share.tp, max(1.0, spec.num_kv_heads / share.tp) * head
    if spec.gated:
        yield _attention(2 * b * q * s, "qkv_linear")
    if spec.qk_norm:
        yield _attention(normed(share, kv, kv / head) * s, "qkv_linear")
        if not spec.gated or in_fp32(share):
            yield _attention(normed(share, q, q / head) * s, "qkv_linear")
    for size in (q, kv, kv):
        yield _attention(b * size * s, "core_attn")


def _core(share: Share, spec: GqaSpec | MlaSpec, width: float) -> Iterator[Kept]:
    """What the kernel keeps beside what it reads; the next product keeps its output too, or a tensor made of that."""
    if "core_attn" in share.again:
        return
    output = share.width * width * share.s
    yield _attention(FP32 * spec.num_heads / share.tp * share.s, "core_attn")
    yield _attention(share.scores(spec) + share.beside_scores(spec), "core_attn")
    if isinstance(spec, GqaSpec) and spec.gated:
        yield _attention(output, "core_attn")
    if output_apart(share, spec):
        yield _attention(output, "core_attn")
        yield _attention(output, "attn_proj")
    else:
        yield _attention(output, "core_attn", "attn_proj")


def _attention(size: float, *by: str) -> Kept:
    return Kept(size, "attention", by)


def _experts(share: Share) -> Iterator[Kept]:
    """Tokens that experts read where they are stay: the router keeps them too."""
    moe, dim, r = share.model.moe, share.model.dim, share.r
    assert moe is not None
    rows = 0.0 if share.in_one or share.low else share.width * dim * r
    if share.fused_experts:
        yield Kept(rows, "dispatch", (_FUSED,))
        yield Kept(experts(share), "experts", (_FUSED,))
        return
    inner = share.width * moe.expert_dim / share.plan.layout.etp * r
    last = 0.0 if "moe_act" in share.again else (share.low / share.width or 1.0) * inner
    entered, biases = share.low * dim * r, share.width * dim * r if moe.bias else 0.0
    yield Kept(rows, "dispatch", ("expert_fc1",))
    yield Kept(entered, "experts", ("expert_fc1",))
    yield Kept(experts(share) - entered - last - biases, "experts", ("moe_act",))
    yield Kept(last + biases, "experts", ("expert_fc2",))
