"""Memory of EP overlap in our own engine: a forward and a backward beside each other, each from stop to stop.

A pass stops where an exchange of a layer with experts has started; there the other one goes on. So the backward gives
up, a stop at a time, what the forward takes, and the fullest moment of a pair is above its start by one stop's worth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from threefold.cost.gathered import narrow_copies, units
from threefold.cost.kept import layer_again
from threefold.cost.moments import backward_moment, forward_moment, loss_moment, mixer_moment
from threefold.cost.pairs import Pair, pairs_of
from threefold.cost.place import NOTHING, Held, Place, chunk_layers
from threefold.cost.share import FP32, INDEX, Share
from threefold.cost.waiting import layer_waits, split_moment, weight_moment
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

Saved = dict[Layer, dict[str, float]]
NAME = "a merged pass"
_BEHIND = ("dispatch", "experts", "shared_experts")  # terms of a layer that come behind its first stop


@dataclass(frozen=True, slots=True)
class Run:
    """From stop to stop: bytes above the start at most and at the end, and those under way after it. `weights`: what
    waits for weight gradients until the forward's next stop."""

    peak: float = 0.0
    change: float = 0.0
    sent: float = 0.0
    weights: float = 0.0
    name: str = NAME


@dataclass(frozen=True, slots=True)
class Whole:
    """Bytes that FSDP gathers: the root, a layer but for its experts, its experts. Reductions are in fp32."""

    root: float = 0.0
    layer: float = 0.0
    experts: float = 0.0
    wide_root: float = 0.0
    wide_layer: float = 0.0
    wide_experts: float = 0.0
    gradients: float = 0.0  # of experts, as the backward makes them
    narrow: float = 0.0  # of experts, in FP8, made for use


def fullest(plan: Plan, stage: int, chunks: Sequence[Chunk], saved: Saved, skew: float) -> tuple[Pair, float, str]:
    """The pair with the fullest moment, what that takes above its microbatches, and what it is."""
    share = Share(plan, skew)
    sizes = [_chunk_bytes(share, chunk, saved) for chunk in chunks]
    again = {layer: _again(share, layer, saved[layer]) for layer in saved}
    forwards = [[*_forward(share, chunk, saved)] for chunk in chunks]
    backwards = [[*_backward(share, chunk, saved, again)] for chunk in chunks]
    before = [_alone(share, chunk) for chunk in chunks]

    def above(pair: Pair) -> tuple[float, str]:
        if pair.forward is None:
            return max(_beside(backwards[pair.backward], []), before[pair.backward])
        return _beside(backwards[pair.backward], forwards[pair.forward])

    def total(pair: Pair) -> float:
        return sum(count * size for count, size in zip(pair.held, sizes, strict=True)) + above(pair)[0]

    pair = max(pairs_of(plan, stage), key=total)
    return pair, *above(pair)


def _alone(share: Share, chunk: Chunk) -> tuple[float, str]:
    """At the end of a forward that no backward is beside."""
    most = max(forward_moment(share, layer) for layer in chunk_layers(share.plan, chunk) or [NOTHING])
    if heads := chunk.loss + chunk.mtp:
        return max((most, "a forward"), (loss_moment(share, heads)[0] + _whole(share, chunk).root, "the loss"))
    return most, "a forward"


def _chunk_bytes(share: Share, chunk: Chunk, saved: Saved) -> float:
    row = share.width * share.model.dim * share.t
    ends = chunk.mtp * 5 * row + (row if chunk.loss else 0.0) + (2 * INDEX * share.s if chunk.embedding else 0.0)
    return sum(sum(saved[layer].values()) for layer in chunk_layers(share.plan, chunk)) + ends


def _beside(backward: Sequence[Run], forward: Sequence[Run]) -> tuple[float, str]:
    """The fullest moment, above what both hold when they begin, and its name."""
    sent, waiting, level, most = [0.0, 0.0], 0.0, 0.0, (0.0, "")
    for runs in zip_longest(backward, forward, fillvalue=Run()):
        for mine, run in enumerate(runs):
            most = max(most, (level + waiting + sent[1 - mine] + run.peak, run.name))
            level, sent[mine] = level + run.change, run.sent
            waiting = 0.0 if mine else run.weights
    return most


def _forward(share: Share, chunk: Chunk, saved: Saved) -> Iterator[Run]:
    under_way, peak, change = _rows(share), 0.0, 0.0
    for layer in chunk_layers(share.plan, chunk):
        of, (first, second) = _whole(share, chunk, layer), _halves(saved[layer])
        whole = of.root + of.layer
        change += first
        if layer.ffn == "moe":
            yield Run(max(peak, change + under_way + whole), change, under_way)
            # Weights are gathered into one buffer and copied out of it; the buffer outlives the copies. Products in a
            # narrow format do not keep the rows they read, which are there until then.
            read = under_way if share.low else 0.0
            moment = second + max(forward_moment(share, layer), under_way / 2 + read + of.experts)
            yield Run(moment + whole + of.experts + of.narrow, second, under_way)
            peak = change = 0.0
        else:
            change += second
            peak = max(peak, change + forward_moment(share, layer) + whole)
    name, heads = NAME, chunk.loss + chunk.mtp
    if heads:
        full, kept = loss_moment(share, heads)
        full += _whole(share, chunk).root
        name = "the loss" if change + full >= peak else name
        peak, change = max(peak, change + full), change + kept
    yield Run(max(peak, change), change, name=name)


def _backward(share: Share, chunk: Chunk, saved: Saved, made: dict[Layer, tuple[float, float]]) -> Iterator[Run]:
    """`made`: of each layer again, before its first stop and behind."""
    under_way, name, peak, change, weights = _rows(share), NAME, 0.0, 0.0, 0.0
    table = share.width * share.model.vocab / share.tp * share.model.dim
    of = _whole(share, chunk)
    if heads := chunk.loss + chunk.mtp:
        name = "the loss's backward"
        peak = loss_moment(share, heads)[1] + table + share.width * share.model.dim * share.s + of.root
    late = share.plan.knobs.delay_wgrad and share.plan.knobs.data_parallel == "zero1"
    held = table if of.root and heads else 0.0  # the head's gradients wait for those of the embedding
    reduced = held
    layers = chunk_layers(share.plan, chunk)
    for number, layer in reversed([*enumerate(layers)]):
        of, (first, second) = _whole(share, chunk, layer), _halves(saved[layer])
        whole, (again, more) = of.root + of.layer, made[layer]
        if layer.ffn == "moe":
            yield Run(max(peak, under_way), change, under_way + reduced, weights, name)
            moment = max(_experts_moment(share, layer, saved[layer], late) + more, under_way + of.experts) + of.experts
            moment += of.narrow
            reduction = of.wide_experts + of.gradients - second
            yield Run(max(moment, reduction) + reduced + whole, -second, under_way + of.wide_experts + held)
            name, change = NAME, -first
            ahead = _whole(share, chunk, layers[number - 1]).layer if number else 0.0
            peak = mixer_moment(share, layer) + again + whole + of.wide_experts + ahead + held
            weights, reduced = _delayed(share, layer) if late else 0.0, of.wide_layer + held
        else:
            peak = max(peak, change + backward_moment(share, layer) + again + more + whole + held)
            change -= first + second
            weights += _delayed(share, layer) if late else 0.0
    looks = chunk.embedding + chunk.mtp  # each makes a gradient of the whole table, and they are added
    end = weights + max(table * (looks + 1 if looks > 1 else looks), of.wide_root + of.root)
    yield Run(max(peak, change + end), change, name=name)


def _whole(share: Share, chunk: Chunk, layer: Layer = NOTHING) -> Whole:
    if share.plan.knobs.data_parallel == "zero1":
        return Whole()
    held, b = Held((chunk,), (), chunk.embedding, chunk.mtp, chunk.loss), share.width
    of = units(share.plan, held, Place(layer, (), None, closes=False, mtp=False, done=0.0))
    wide = FP32 * of.root, FP32 * of.layer, FP32 * of.padded
    return Whole(b * of.root, b * of.layer, b * of.padded, *wide, b * of.experts, narrow_copies(share, of))


def _again(share: Share, layer: Layer, saved: dict[str, float]) -> tuple[float, float]:
    """What recompute makes of a layer, before its first stop and behind."""
    if not share.again:
        return 0.0, 0.0
    first, second = _halves(layer_again(share, layer, share.plain))
    kept, more = _halves(saved)
    return max(0.0, first - kept), max(0.0, second - more)


def _experts_moment(share: Share, layer: Layer, saved: dict[str, float], late: bool) -> float:
    """Late weights: then gradients of rows came and go back, FC1's are there, and what products read."""
    moment, moe = backward_moment(share, layer), share.model.moe
    if moe is None or not late:
        return moment
    inner = share.width * moe.expert_dim / share.plan.layout.etp * share.r
    rows = share.width * share.model.dim * share.r
    gone = max(0.0, saved.get("experts", 0.0) - inner)
    return max(split_moment(share, layer), rows + _rows(share) + 2 * inner + weight_moment(share, layer) - gone)


def _halves(saved: dict[str, float]) -> tuple[float, float]:
    """Of a layer: kept before its first stop, and behind."""
    behind = sum(saved.get(name, 0.0) for name in _BEHIND)
    return sum(saved.values()) - behind, behind


def _rows(share: Share) -> float:
    """An exchange under way: rows as they were sent, and as they come."""
    return share.width * share.model.dim * (share.sent + share.r / share.plan.layout.etp)


def _delayed(share: Share, layer: Layer) -> float:
    """What waits for the gradients of weights; those of experts wait for nothing."""
    waits = layer_waits(share, layer)
    return waits.mixer + waits.dense
