"""The fullest moment of a pipeline rank in our own engine: what it holds beside what its microbatches keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from threefold.cost.gathered import around_experts, around_root, beside, narrow_copies, units
from threefold.cost.kept import layer_again, layer_kept, made_late
from threefold.cost.moments import (
    backward_moment,
    embedding_moment,
    expert_steps,
    forward_moment,
    loss_moment,
    mixer_moment,
    optimizer_moment,
)
from threefold.cost.own import borders, head_gradient, late_gradients
from threefold.cost.place import NOTHING, Held, Moment, Place, Terms, added, chunk_layers, of_layer, places
from threefold.cost.sent import NONE, SENDERS, Sent
from threefold.cost.share import Share
from threefold.cost.turns import Turn, turns
from threefold.cost.waiting import (
    NO_WAITS,
    Waits,
    chunk_waits,
    layer_waits,
    split_moment,
    splits_backward,
    weight_moment,
)
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer
from threefold.units import MIB

LIBRARIES = 2 * 32 * MIB  # of cuBLAS on Hopper, for the forward and for the backward
_FEED = ("mlp", "router", "dispatch", "experts", "shared_experts")
Saved = dict[Layer, Terms]


@dataclass(frozen=True, slots=True)
class Peak:
    """`missing`: gradients that are still to come. `waiting`: what is there for weights to get theirs."""

    turn: Turn
    moment: Moment
    missing: float
    waiting: float
    libraries: float

    def add_to(self, terms: Terms) -> str:
        """Its bytes, to terms with all that is kept; returns what it is."""
        terms["gradients"] -= self.missing
        for name, size in self.moment.gone.items():
            terms[name] = terms.get(name, 0.0) - size
        for name, size in self.moment.size.items():
            terms[name] = terms.get(name, 0.0) + size
        # Of a sum it does not matter which term had less than has gone.
        less = {name: size for name, size in terms.items() if size < 0}
        terms |= dict.fromkeys(less, 0.0)
        terms["workspace"] = terms.get("workspace", 0.0) + self.waiting + self.libraries + sum(less.values())
        return (
            self.moment.name if self.moment.way == "after" else f"{self.moment.name}, with all microbatches in flight"
        )


class Peaks:
    """Of all stages of a plan, many of which hold alike chunks. `saved`: what each kind of layer keeps on the device;
    `sent`: on the host."""

    def __init__(self, plan: Plan, saved: Saved, sent: Mapping[Layer, Sent], skew: float) -> None:
        self.plan, self.saved, self.sent, self.share = plan, saved, sent, Share(plan, skew)
        self.split = splits_backward(plan)
        self.waits = {layer: layer_waits(self.share, layer) if self.split else NO_WAITS for layer in (*saved, NOTHING)}
        whole = {layer: added((saved[layer], sent[layer].terms)) for layer in saved} | {NOTHING: {}}
        self.layers = {layer: _sizes(self.share, layer, kept) for layer, kept in whole.items()}
        self._known: dict[object, list[tuple[float, Moment]]] = {}

    def of(self, stage: int, held: Held, gradients: float, flights: Sequence[int]) -> Peak:
        layers = [chunk_layers(self.plan, chunk) for chunk in held.chunks]
        kept = [sum(sum(self.saved[layer].values()) for layer in chunk) for chunk in layers]
        waits = [chunk_waits(self.share, chunk, self.waits) if self.split else 0.0 for chunk in held.chunks]
        head = head_gradient(self.share, held)
        body = max(0.0, late_gradients(self.share, held, gradients) - head)
        parts = [body * len(chunk) / max(1, sum(map(len, layers))) for chunk in layers]
        late, row = bool(body or head), self.share.width * self.share.model.dim * self.share.t
        met: dict[tuple[int, str], list[tuple[float, Moment]]] = {}
        fullest: tuple[float, Turn, Moment, float, float] | None = None
        for turn in turns(self.plan, stage, flights):
            base = row * borders(self.plan, stage, held, turn.held, turn.back)
            waiting = sum(count * size for count, size in zip(turn.waiting, waits, strict=False))
            base += waiting
            for count, size in zip(turn.held, kept, strict=False):
                base += count * size
            # Gradients come with the first backward of a chunk, where no buffer waits for them.
            to_come = [0.0 if back else part for part, back in zip(parts, turn.back, strict=False)] if late else parts
            of_head = head if late and not turn.back[-1] else 0.0
            missing = sum(to_come) + of_head
            for number, way in turn.met:
                if (number, way) not in met:
                    met[number, way] = self._at(held, number, way, late)
                for above, moment in met[number, way]:
                    there = to_come[number] * moment.done + of_head * moment.after_head
                    if fullest is None or base - missing + above + there > fullest[0]:
                        fullest = base - missing + above + there, turn, moment, missing - there, waiting
        assert fullest is not None
        libraries = LIBRARIES if self.share.fused else 0.0
        above = optimizer_moment(self.share, held)
        if above > fullest[0]:
            none = (0,) * len(held.chunks)
            after = Turn(none, -1, -1, (max(1, self.plan.num_microbatches),) * len(none), none)
            return Peak(after, Moment("the optimizer's step", "after", {"workspace": above}), 0.0, 0.0, libraries)
        return Peak(*fullest[1:], libraries)

    def _at(self, held: Held, number: int, way: str, late: bool) -> list[tuple[float, Moment]]:
        """Of a chunk, with how much they are above what is kept; where no gradients come late, only the fullest."""
        chunk = held.chunks[number]
        layers = chunk_layers(self.plan, chunk)
        key = layers, chunk.embedding, chunk.mtp, chunk.loss, held.embedding, held.mtp, held.loss, late
        if (key, way) not in self._known:
            rows = [(moment.above, moment) for moment in self._moments(held, number)]
            for each in ("forward", "backward", *(("weights",) if self.split else ())):
                these = [row for row in rows if row[1].way == each]
                self._known[key, each] = these if late else [max(these, key=lambda row: row[0])]
        return self._known[key, way]

    def _moments(self, held: Held, number: int) -> list[Moment]:
        share, chunk = self.share, held.chunks[number]
        # Another chunk's part of the model's end is in parts here: its backward comes right behind its forward.
        ends, held = held.loss + held.mtp, replace(held, mtp=chunk.mtp, loss=chunk.loss)
        found = _at_loss(share, held) if chunk.loss or chunk.mtp else []
        at = places(self.plan, chunk)
        for place in at:
            found += _at_layer(share, held, chunk, place, self.saved, self.sent, self.layers[place.layer], self.waits)
        whole = added(self.saved[layer] for layer in chunk_layers(self.plan, chunk))
        if self.plan.knobs.data_parallel != "zero1":
            found += around_root(share, units(self.plan, held, at[0]), chunk, whole)
        elif chunk.embedding:
            left = chunk_waits(share, chunk, self.waits) if self.split else 0.0
            size = {"workspace": embedding_moment(share, chunk.mtp > 0) + left}
            found.append(Moment("the embedding's backward", "backward", size, whole, 1.0, after_head=True))
        if self.split:
            most = max(weight_moment(share, place.layer) for place in at)
            found.append(Moment("gradients of weights that waited", "weights", {"workspace": most}, {}, 1.0))
        if ends and not chunk.loss and self.plan.layout.pipeline_schedule == "dualpipev":
            # Both arms of the V work in turn: a microbatch is between the loss and its backward.
            for moment in found:
                moment.size["logits"] = moment.size.get("logits", 0.0) + loss_moment(share, ends)[1]
        return found


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a kind of layer: at the end of a forward and of a second one, in backwards, and what these make again."""

    forward: float
    second: float
    backward: Terms  # by whose backward it is
    mixer: float
    feed_again: float
    mixer_again: float
    experts: float  # kept of them without recompute


def _sizes(share: Share, layer: Layer, kept: Terms) -> Sizes:
    share = of_layer(share, layer)
    feed, mixer = _again(share, layer, kept)
    plain = layer_kept(share.plain, layer)
    forward = forward_moment(share, layer)
    # Shared experts come last.
    last = 0.0 if share.plan.knobs.shared_expert_overlap else plain.get("shared_experts", 0.0)
    return Sizes(
        forward=forward,
        second=forward + feed - last,
        backward=_steps(share, layer),
        mixer=mixer_moment(share, layer),
        feed_again=feed,
        mixer_again=mixer,
        experts=plain.get("experts", 0.0),
    )


def _steps(share: Share, layer: Layer) -> Terms:
    if splits_backward(share.plan) and layer.ffn != "none":
        return dict.fromkeys(SENDERS, split_moment(share, layer))
    return expert_steps(share) if layer.ffn == "moe" else {layer.ffn: backward_moment(share, layer)}


def _at_loss(share: Share, held: Held) -> list[Moment]:
    full, kept = loss_moment(share, held.loss + held.mtp)
    head = share.width * share.model.dim * (share.model.vocab / share.tp + share.s)
    root = 0.0
    if share.plan.knobs.data_parallel != "zero1":
        root = share.width * units(share.plan, held, Place(NOTHING, (), None, True, False, 0.0)).root
    return [
        Moment("the loss", "forward", {"logits": full, "workspace": root}),
        Moment("the loss's backward", "backward", {"logits": kept, "workspace": head + root}, after_head=True),
    ]


def _at_layer(
    share: Share,
    held: Held,
    chunk: Chunk,
    place: Place,
    saved: Saved,
    sent: Mapping[Layer, Sent],
    of: Sizes,
    waits: dict[Layer, Waits],
) -> list[Moment]:
    layer, gone = place.layer, added([place.gone(saved), _ends(share, chunk, place)])
    share = of_layer(share, layer)
    together = _unit_before(share, chunk, place)
    row = share.width * share.model.dim * share.t
    sizes: dict[str, Terms] = {
        "a forward": {"dispatch" if layer.ffn == "moe" else "mlp": of.forward},
        "a backward": {"workspace": max(of.backward.values()), "recompute": of.feed_again},
    }
    if layer.ffn == "moe" and share.again & {"moe", "full"}:
        sizes["a second forward"] = {"workspace": row, "recompute": of.second}
    if layer.mixer in ("attention", "window"):
        sizes["a mixer's backward"] = {"workspace": of.mixer, "recompute": of.mixer_again}
    found = []
    if share.plan.knobs.data_parallel != "zero1":
        # Where the next one was recomputed with this one it is there already.
        whole = units(share.plan, held, replace(place, ahead=None) if together else place)
        more = beside(share, whole)
        found = around_experts(share, whole, place, of.experts, of.feed_again, gone)
    else:
        # Multi-token prediction's part of the table's gradient waits for the rest.
        table = share.width * share.model.vocab / share.tp * share.model.dim
        more = dict.fromkeys(sizes, table if place.mtp and chunk.embedding else 0.0) | {"a forward": 0.0}
    left = added([gone, _fed(share, saved.get(layer, {}), sent.get(layer, NONE))])
    behind = sum(waits[each].whole for each in place.behind)
    more = {name: size + (0.0 if name == "a forward" else behind) for name, size in more.items()}
    if "a mixer's backward" in sizes:
        more["a mixer's backward"] += waits[layer].feed
    for name, size in sizes.items():
        size["workspace"] = size.get("workspace", 0.0) + more[name]
        if name == "a forward":
            found.append(Moment(name, "forward", size, gone))
        else:
            over = left if name == "a mixer's backward" else gone
            found.append(Moment(name, "backward", size, over, place.done, after_head=True))
    others, back = _made_together(share, held, place, together), _back(share.plan, chunk, place, sent, of.backward)
    for moment in found:
        if moment.way == "backward":
            for name, bytes_more in (*others.items(), ("workspace", back.get(moment.name, 0.0))):
                moment.size[name] = moment.size.get(name, 0.0) + bytes_more
    return found


def _back(plan: Plan, chunk: Chunk, place: Place, sent: Mapping[Layer, Sent], steps: Terms) -> Terms:
    """What has come back from the host in a layer's moments: all of it with the first tensor that is asked for, and
    with it that of the layer ahead. `steps`: of its feed-forward part's backward."""
    behind, ahead = _neighbours(plan, chunk, place)
    this = sent.get(place.layer, NONE)
    next_one = sent[ahead].whole if ahead else 0.0
    early = behind is not None and sent[behind].whole > 0
    before, asked, most = this.whole if early else 0.0, False, 0.0
    for name, size in steps.items():
        asked = asked or name in this.by
        most = max(most, size + (this.whole + next_one if asked else before))
    mixed = sum(this.mixer.values()) if early or this.asked else 0.0
    return {
        "a gathering": before,
        "a second forward": before,
        "a backward": most - max(steps.values()),
        "a reduction": this.whole + next_one if asked else before,
        "a mixer's backward": mixed + (next_one if this.asked else 0.0),
    }


def _neighbours(plan: Plan, chunk: Chunk, place: Place) -> tuple[Layer | None, Layer | None]:
    """Behind and ahead of a layer in its own run: that of the chunk's layers, or of a depth of multi-token
    prediction."""
    number, body = len(chunk_layers(plan, chunk)) - len(place.behind) - 1, len(chunk.layers)
    size = body if number < body else len(plan.model.mtp_depth)
    at = number if number < body else (number - body) % size
    return place.behind[0] if at < size - 1 else None, place.ahead if at > 0 else None


def _unit_before(share: Share, chunk: Chunk, place: Place) -> tuple[Layer, ...]:
    """Layers that are recomputed together with this one and come before it."""
    layers = chunk_layers(share.plan, chunk)
    number = len(layers) - len(place.behind) - 1
    return layers[number - number % share.unit : number] if number < len(chunk.layers) else ()


def _made_together(share: Share, held: Held, place: Place, layers: Sequence[Layer]) -> Terms:
    """What was made again of them, and their weights, which stay gathered until their backward."""
    if not layers:
        return {}
    made, gathered = sum(sum(layer_kept(share.plain, layer).values()) for layer in layers), 0.0
    if share.plan.knobs.data_parallel != "zero1":
        for layer in layers:
            of = units(share.plan, held, replace(place, layer=layer))
            gathered += share.width * (of.layer + of.padded) + narrow_copies(share, of)
    return {"recompute": made, "workspace": gathered}


def _ends(share: Share, chunk: Chunk, place: Place) -> Terms:
    """What the last norm and multi-token prediction keep beside layers, for a microbatch that is at a layer of the
    model."""
    if place.closes and chunk.mtp:
        return {}
    row = share.width * share.model.dim * share.t
    return {"norms": row * (chunk.loss + 4 * chunk.mtp), "embedding": row * chunk.mtp}


def _fed(share: Share, kept: Terms, sent: Sent) -> Terms:
    """What is kept behind the mixer, on the device."""
    fed = {name: size for name, size in kept.items() if name in _FEED}
    norms = kept.get("norms", 0.0) + sent.terms.get("norms", 0.0)
    return fed if "full" in share.again else fed | {"norms": norms / 2 - sent.feed.get("norms", 0.0)}


def _again(share: Share, layer: Layer, kept: Terms) -> tuple[float, float]:
    """What a layer makes again for the backward of its feed-forward part, and of its mixer."""
    if not share.again:
        return 0.0, 0.0
    made = layer_again(share, layer, share.plain)
    feed = sum(made.get(name, 0.0) - kept.get(name, 0.0) for name in _FEED)
    mixer = made.get("attention", 0.0) - kept.get("attention", 0.0)
    row = share.width * share.model.dim * share.t
    if "full" in share.again:
        norms = made["norms"] - kept.get("norms", 0.0)
        return feed + mixer + norms - made_late(share, layer, share.plain), mixer + row
    normed = row if "layernorm" in share.again else 0.0
    return feed + normed, mixer + normed
