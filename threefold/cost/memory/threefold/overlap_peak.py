"""The peak of a pipeline rank of our own engine under EP overlap, where a forward and a backward alternate.

A pass stops where it has started an exchange of an MoE layer; there the other pass goes on until its own next stop. So
the backward frees, one segment at a time, what the forward allocates, and the peak of a pair is above its start by
about one segment. `model.py` asks `OverlapPeakFinder` for each stage with pairs.

Mirrors `engine/schedule/overlappable_pass.py`, `engine/schedule/interleave.py`, `engine/schedule/autograd_cuts.py`,
`engine/schedule/autograd_nodes.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import itemgetter, mul

from threefold.cost.memory.stage_memory import Terms, add_terms
from threefold.cost.memory.threefold.activations import layer_activations, recomputed_activations
from threefold.cost.memory.threefold.delayed_wgrad import (
    NO_WGRAD,
    WgradBytes,
    chunk_wgrad_bytes,
    delayed_wgrad_bytes,
    output_projection_bytes,
    splits_some_backwards,
    wgrad_transients,
)
from threefold.cost.memory.threefold.layer_points import chunk_features
from threefold.cost.memory.threefold.local_sizes import FP32, INT64, LocalSizes
from threefold.cost.memory.threefold.peak_points import NO_LAYER
from threefold.cost.memory.threefold.schedule import OverlapPair, stage_overlap_pairs
from threefold.cost.memory.threefold.states import head_gradient_bytes, late_gradient_bytes
from threefold.cost.memory.threefold.timelines.moe_backward import moe_backward_steps
from threefold.cost.memory.threefold.timelines.moe_forward import (
    NO_EXCHANGE,
    MoeRows,
    exchange_bytes,
    overlapped_experts_peak,
)
from threefold.cost.memory.threefold.timelines.overlapped_units import gathered_bytes, prefetched_bytes
from threefold.cost.memory.threefold.timelines.pipeline_buffers import PipelineBuffers
from threefold.cost.memory.threefold.transients import (
    ffn_backward_transients,
    forward_transients,
    loss_transients,
    mixer_backward_transients,
    shared_backward_transients,
)
from threefold.cost.stage_contents import StageContents, chunk_layers
from threefold.cost.vision import PlacedFeatures, vision_saved_bytes
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

SavedByLayer = dict[Layer, Terms]
MERGED_PASS = "a merged pass"
_AFTER_DISPATCH = ("dispatch", "experts", "shared_experts")  # terms of a layer that are saved after its first stop


@dataclass(frozen=True, slots=True)
class Segment:
    """A pass from one stop to the next."""

    peak: float = 0.0  # the most bytes above its start
    change: float = 0.0  # bytes at its end above its start
    saved: Terms = field(default_factory=dict)  # activations among those bytes, by term; negative where they are freed
    held: Terms = field(default_factory=dict)  # activations among the bytes of its peak
    exchange: float = 0.0  # bytes of the exchange that is in flight after it
    delayed_wgrad: float = 0.0  # bytes kept for weight gradients until the forward waits for counts or stops
    name: str = MERGED_PASS
    peak_before_counts: float | None = None  # the peak before a forward waits for counts; None if it does not
    done_fraction: float = 0.0  # fraction of the chunk's layers that have their weight gradients after a backward's
    reduced_shards: float = 0.0  # bytes of gradients that HSDP has reduced by then, and holds until the backward ends


class OverlapPeakFinder:
    """Finds the peak of every stage of one plan. Chunks with equal contents share what was computed for them."""

    def __init__(self, plan: Plan, saved: SavedByLayer, skew: float) -> None:
        """`saved` is what each kind of layer keeps on the device."""
        self.plan, self.local, self.saved = plan, LocalSizes(plan, skew), saved
        self.recomputed = {layer: _recomputed_halves(self.local, layer, saved[layer]) for layer in saved}
        self._passes: dict[object, ChunkPasses] = {}
        self._peaks: dict[object, PairPeak] = {}

    def find(self, stage: int, contents: StageContents, gradients: float) -> "OverlapPeak":
        """The highest peak of a stage with so many bytes of gradients."""
        chunks, row = contents.chunks, self.local.element_bytes * self.local.model.dim * self.local.tokens
        kinds = [
            (chunk_layers(self.plan, chunk), chunk.embedding, chunk.mtp, chunk.loss, chunk_features(self.plan, chunk))
            for chunk in chunks
        ]
        sizes = [self._chunk_passes(kind, chunk).saved_bytes for kind, chunk in zip(kinds, chunks, strict=True)]
        roots = [gathered_bytes(self.local, chunk).root for chunk in chunks]
        delays = splits_some_backwards(self.plan)
        by_layer = {layer: delayed_wgrad_bytes(self.local, layer) if delays else NO_WGRAD for layer in self.saved}
        wgrad = [chunk_wgrad_bytes(self.local, chunk, by_layer) if delays else 0.0 for chunk in chunks]
        head = head_gradient_bytes(self.local, contents)
        body = max(0.0, late_gradient_bytes(self.local, contents, gradients) - head)
        num_layers = max(1, sum(len(layers) for layers, *_ in kinds))
        # Bytes of each chunk's gradients that exist only from its first backward on.
        late = [
            LateGradients(
                body * len(layers) / num_layers, head if chunk.loss else 0.0, self.local.reduced_bytes == FP32
            )
            for (layers, *_), chunk in zip(kinds, chunks, strict=True)
        ]

        buffers, best = PipelineBuffers(self.plan, stage, contents), None
        for pair in stage_overlap_pairs(self.plan, stage):
            forward = None if pair.forward_chunk is None else kinds[pair.forward_chunk]
            to_come = [NO_GRADIENTS if done else each for each, done in zip(late, pair.finished, strict=True)]
            peak = self._pair_peak(kinds[pair.backward_chunk], forward, to_come[pair.backward_chunk])
            above = peak.num_bytes
            if any(roots):
                # From its first forward to the end of its backward a chunk's root stays gathered.
                used = [count or number == pair.forward_chunk for number, count in enumerate(pair.in_flight)]
                above += sum(root for root, is_used in zip(roots, used, strict=True) if is_used)
            missing = sum(each.body + each.head for each in to_come)
            above += sum(map(mul, pair.pending_wgrad, wgrad))
            held = sum(map(mul, pair.in_flight, sizes)) + row * buffers.count(pair.in_flight, pair.finished)
            if best is None or held + above - missing > best[0]:
                best = held + above - missing, OverlapPeak(pair, peak.named(above), missing, peak.name)
        assert best is not None
        return best[1]

    def _chunk_passes(self, kind: object, chunk: Chunk) -> "ChunkPasses":
        if kind not in self._passes:
            vision = vision_saved_bytes(self.plan) if chunk.embedding else 0.0
            features = chunk_features(self.plan, chunk)
            received = features.num_received * features.row
            alone = _forward_alone(self.local, chunk)
            self._passes[kind] = ChunkPasses(
                _chunk_activations(self.local, chunk, self.saved) + vision + received,
                _with_features([*_forward_segments(self.local, chunk, self.saved)], features, vision),
                _with_feature_gradients(
                    [*_backward_segments(self.local, chunk, self.saved, self.recomputed)], features, vision
                ),
                replace(alone, num_bytes=alone.num_bytes + features.in_forward),
            )
        return self._passes[kind]

    def _pair_peak(self, backward: object, forward: object | None, late: "LateGradients") -> "PairPeak":
        """The peak of a backward through one kind of chunk beside a forward through another, or alone."""
        key = backward, forward, late
        if key not in self._peaks:
            passes = self._passes[backward]
            if forward is None:
                peak = max(_alternate(passes.backward, [], late), passes.forward_alone, key=_size)
            else:
                peak = _alternate(passes.backward, self._passes[forward].forward, late)
            self._peaks[key] = peak
        return self._peaks[key]


@dataclass(frozen=True, slots=True)
class PairPeak:
    """The peak of a pair of passes above what both hold at their start."""

    num_bytes: float
    name: str
    terms: Terms = field(default_factory=dict)  # activations and gradients among the bytes

    def named(self, num_bytes: float) -> Terms:
        """So many bytes by term; what is neither an activation nor a gradient is workspace."""
        return add_terms([self.terms, {"workspace": num_bytes - sum(self.terms.values())}])


def _size(peak: PairPeak) -> float:
    return peak.num_bytes


@dataclass(frozen=True, slots=True)
class OverlapPeak:
    """The highest peak of a stage: its pair, its bytes above the microbatches in flight, and its name."""

    pair: OverlapPair
    above: Terms  # with the late gradients that the backward has made by then
    missing_gradients: float  # bytes of late gradients that did not exist before the pair
    name: str


@dataclass(frozen=True, slots=True)
class LateGradients:
    """Bytes of gradients that a backward is the first to make."""

    body: float = 0.0  # of the layers, one after the other
    head: float = 0.0  # of the output layer, first
    are_reduced_shards: bool = False  # whether they are the very tensors that HSDP has reduced


NO_GRADIENTS = LateGradients()


@dataclass(frozen=True, slots=True)
class ChunkPasses:
    """One microbatch in a chunk: what it holds, and its passes."""

    saved_bytes: float
    forward: Sequence[Segment]
    backward: Sequence[Segment]
    forward_alone: PairPeak


def _with_features(segments: Sequence[Segment], features: PlacedFeatures, vision: float) -> list[Segment]:
    """The segments of a forward with pictures, which encodes them and places their features before anything else.
    `vision` is saved; the features are held until the layers are through."""
    first, *rest = segments or [Segment()]
    held = features.in_forward
    peak, named = vision + max(first.peak + held, features.while_placing), {"vision": vision}
    saved, at_peak = add_terms([first.saved, named]), add_terms([first.held, named])
    first = replace(first, peak=peak, change=first.change + vision + held, saved=saved, held=at_peak)
    *others, last = [first, *rest]
    return [*others, replace(last, change=last.change - held)]


def _with_feature_gradients(segments: Sequence[Segment], features: PlacedFeatures, vision: float) -> list[Segment]:
    """The segments of a backward with pictures: the gradients of their features come last, and free what was saved."""
    *others, last = segments or [Segment()]
    peak = max(last.peak + features.gradients(0), last.change + features.backward)
    saved = add_terms([last.saved, {"vision": -vision}])
    return [*others, replace(last, peak=peak, change=last.change - vision, saved=saved)]


_OVER = Segment(done_fraction=1.0)


def _alternate(backward: Sequence[Segment], forward: Sequence[Segment], late: LateGradients = NO_GRADIENTS) -> PairPeak:
    """The peak of two passes in alternation, above what both hold at their start."""
    exchanges, wgrad, level, gradients, shards = [0.0, 0.0], 0.0, 0.0, 0.0, 0.0
    most, number_at_peak, gradients_at_peak = (0.0, ""), 0, 0.0
    order = [one for both in zip_longest(backward, forward, fillvalue=_OVER) for one in both]
    for number, segment in enumerate(order):
        index = number % 2
        peak = segment.peak + wgrad
        if segment.peak_before_counts is not None:
            peak = max(segment.peak, segment.peak_before_counts + wgrad)
        here = level + gradients + shards + exchanges[1 - index] + peak, segment.name
        if here > most:
            most, number_at_peak, gradients_at_peak = here, number, gradients
        level, exchanges[index] = level + segment.change, segment.exchange
        wgrad = 0.0 if index else segment.delayed_wgrad
        if not index:
            gradients = late.head + late.body * segment.done_fraction
            shards = 0.0 if late.are_reduced_shards else segment.reduced_shards
    if not order:
        return PairPeak(*most)
    activations = [segment.saved for segment in order[:number_at_peak]] + [order[number_at_peak].held]
    return PairPeak(*most, add_terms([*activations, {"gradients": gradients_at_peak}]))


def _forward_alone(local: LocalSizes, chunk: Chunk) -> PairPeak:
    """Bytes at the end of a forward that runs without a backward."""
    most = max(forward_transients(local, layer) for layer in chunk_layers(local.plan, chunk) or [NO_LAYER])
    if num_heads := (1 + local.plan.mtp) * chunk.loss:
        loss = loss_transients(local, num_heads)
        return max(PairPeak(most, "a forward"), PairPeak(loss.peak, "the loss", {"logits": loss.held}), key=_size)
    return PairPeak(most, "a forward")


def _chunk_activations(local: LocalSizes, chunk: Chunk, saved: SavedByLayer) -> float:
    """What one microbatch holds in a chunk."""
    row = local.element_bytes * local.model.dim * local.tokens
    ends = chunk.mtp * 5 * row + (row if chunk.loss else 0.0)
    ends += 2 * INT64 * local.gathered_tokens if chunk.embedding else 0.0
    return sum(sum(saved[layer].values()) for layer in chunk_layers(local.plan, chunk)) + ends


def _forward_segments(local: LocalSizes, chunk: Chunk, saved: SavedByLayer) -> Iterator[Segment]:
    row, peak, change = local.element_bytes * local.model.dim * local.tokens, 0.0, 0.0
    exchange, made = exchange_bytes(local) if local.model.moe else NO_EXCHANGE, list[Terms]()
    for layer in chunk_layers(local.plan, chunk):
        units, (first, second) = gathered_bytes(local, chunk, layer), _halves(saved[layer])
        of_first, of_second = _half_terms(saved[layer])
        made.append(of_first)
        # Weights are gathered into one buffer and copied out of it; the buffer is freed with them, after their use.
        gathered = 2 * units.layer
        change += first
        if layer.ffn == "moe":
            before_counts, dispatch = max(peak, change + row + gathered), change + exchange.dispatch_start
            named, made = add_terms(made), []
            yield Segment(
                max(before_counts, dispatch), change, named, named, exchange.dispatch, peak_before_counts=before_counts
            )
            weights = 2 * units.experts + units.quantized_experts
            peak_bytes = max(overlapped_experts_peak(local, weights), exchange.dispatch + second + gathered)
            shared = row if second > saved[layer].get("dispatch", 0.0) + saved[layer].get("experts", 0.0) else 0.0
            yield Segment(peak_bytes, second, of_second, of_second, exchange.combine + shared)
            peak, change = exchange.combine + shared + row, 0.0
        else:
            change += second
            made.append(of_second)
            peak = max(peak, change + forward_transients(local, layer) + gathered)
    name, num_heads = MERGED_PASS, (1 + local.plan.mtp) * chunk.loss
    if num_heads:
        loss = loss_transients(local, num_heads)
        name = "the loss" if change + loss.peak >= peak else name
        peak, change = max(peak, change + loss.peak), change + loss.saved
        made.append({"logits": loss.held})
    at_peak = add_terms(made)
    named = at_peak | ({"logits": loss.saved} if num_heads else {})
    yield Segment(max(peak, change), change, named, at_peak, name=name)


def _backward_segments(
    local: LocalSizes, chunk: Chunk, saved: SavedByLayer, recomputed: dict[Layer, tuple[float, float]]
) -> Iterator[Segment]:
    """`recomputed` is what each layer makes again, before its first stop and after it."""
    name, peak, change, wgrad = MERGED_PASS, 0.0, 0.0, 0.0
    released, held_then = list[Terms](), Terms()  # since the last stop; and at the highest peak since then
    row = local.element_bytes * local.model.dim * local.tokens  # the residual stream's gradient, which is always there
    exchange = exchange_bytes(local) if local.model.moe else NO_EXCHANGE
    table = local.element_bytes * local.model.vocab / local.tp * local.model.dim * ("head" in local.saved_inputs)
    units = gathered_bytes(local, chunk)
    if num_heads := (1 + local.plan.mtp) * chunk.loss:
        name = "the loss's backward"
        loss = loss_transients(local, num_heads)
        peak = loss.saved + loss.cast
    delays = local.plan.knobs.delay_wgrad and local.plan.knobs.data_parallel == "zero1"
    held = table if units.root and num_heads else 0.0  # the head's gradient waits for that of the embedding
    reducing, shards = held, 0.0
    layers = chunk_layers(local.plan, chunk)
    prefetched = prefetched_bytes(local, chunk, len(layers)) if num_heads else 0.0
    for number, layer in reversed([*enumerate(layers)]):
        units, (first, second) = gathered_bytes(local, chunk, layer), _halves(saved[layer])
        of_layer = _negative(saved[layer])
        gathered, (first_made, second_made) = units.layer, recomputed[layer]
        delayed = delayed_wgrad_bytes(local, layer) if delays else NO_WGRAD
        if layer.ffn == "moe":
            started, traveling = exchange.grads_start + row, exchange.grads_to_experts + row
            after = traveling + reducing + prefetched
            done = (len(layers) - number - 1) / len(layers)
            named = add_terms(released)
            peak, held_then = max((peak, held_then), (change + started, named), key=itemgetter(0))
            yield Segment(peak, change, named, held_then, after, wgrad, name, done_fraction=done, reduced_shards=shards)
            shared = saved[layer].get("shared_experts", 0.0)  # their backward comes while the rows' gradients travel
            second -= shared
            of_experts: Terms = {name: of_layer.pop(name) for name in [*of_layer] if name in ("dispatch", "experts")}
            experts = _expert_backward(local, layer, saved[layer], delays) + second_made
            transient = max(experts, traveling + units.experts) + units.experts + units.quantized_experts
            reduction = units.experts_reduced + units.expert_grads - second
            in_flight = exchange.grads_back + row + units.experts_reduced + held
            peak = max(transient, reduction) + reducing + gathered
            after = shards + units.experts_shard
            done += 0.5 / len(layers)
            yield Segment(peak, -second, of_experts, {}, in_flight, done_fraction=done, reduced_shards=after)
            name, change, released = MERGED_PASS, -first - shared, [of_layer]
            shards += units.experts_shard
            prefetched = prefetched_bytes(local, chunk, number)
            mixer = _mixer_backward(local, layer, delayed) + first_made - shared
            # Before that shared experts have their backward, and the next unit's shards are cast to be gathered.
            before = max(shared_backward_transients(local), prefetched_bytes(local, chunk, number, shards_only=True))
            before += exchange.grads_back + row
            # By then the router, and the norm before it, have had their backward.
            router = {"router": of_layer.get("router", 0.0), "norms": of_layer.get("norms", 0.0) / 2}
            held_then = router | {"shared_experts": -shared} if mixer > before else {}
            peak = max(mixer, before) + gathered + units.experts_reduced + prefetched + held
            wgrad = delayed.mixer + delayed.dense
        else:
            prefetched = prefetched_bytes(local, chunk, number)
            # By then the MLP has freed what it saves without recompute, and its norm's input and output.
            freed = layer_activations(local.without_recompute, layer).get("mlp", 0.0) * local.mlp_chunk_fraction
            mixer = _mixer_backward(local, layer, delayed) - freed - saved[layer].get("norms", 0.0) / 2
            most = max(ffn_backward_transients(local, layer) + second_made, mixer)
            here = change + wgrad + most + first_made + gathered + prefetched + reducing
            gone = {"mlp": of_layer.get("mlp", 0.0)} if most == mixer else {}
            peak, held_then = max((peak, held_then), (here, add_terms([*released, gone])), key=itemgetter(0))
            released.append(of_layer)
            change -= first + second
            wgrad += delayed.mixer + delayed.dense
        shards += units.layer_shard
        reducing = units.layer_reduced + held
    end = wgrad + _embedding_backward(local, chunk, reducing)
    named = add_terms(released)
    peak, held_then = max((peak, held_then), (change + end, named), key=itemgetter(0))
    yield Segment(peak, change, named, held_then, name=name, done_fraction=1.0)


def _mixer_backward(local: LocalSizes, layer: Layer, delayed: WgradBytes) -> float:
    """Bytes in the backward of a layer's mixer, with what is kept by then for the weight gradients that it delays."""
    mixer = mixer_backward_transients(local, layer)
    return mixer + delayed.dense + (output_projection_bytes(local, layer) if delayed.mixer else 0.0)


def _embedding_backward(local: LocalSizes, chunk: Chunk, reducing: float) -> float:
    """Bytes at the end of a chunk's backward: gradients of the embedding's table, and reductions."""
    units, layers = gathered_bytes(local, chunk), chunk_layers(local.plan, chunk)
    table = local.element_bytes * local.model.vocab / local.tp * local.model.dim
    table *= "embedding" in local.saved_inputs
    uses = chunk.embedding + chunk.mtp  # each use makes a gradient of the whole table, and they are added
    embedding = table * (uses + 1 if uses > 1 else uses)
    if not units.root:
        return embedding
    # In a pipeline the embedding's backward too gathers the unit before it: the last one of the forward before.
    ahead = prefetched_bytes(local, chunk, len(layers)) if uses and local.plan.layout.pp > 1 else 0.0
    # The first layer's gradients are being reduced; those of the root are then, without its weights.
    return max(embedding + reducing, units.root_reduced) + ahead


def _recomputed_halves(local: LocalSizes, layer: Layer, saved: Terms) -> tuple[float, float]:
    """What recompute makes of a layer, before its first stop and after it."""
    if not local.recompute:
        return 0.0, 0.0
    first, second = _halves(recomputed_activations(local, layer, local.without_recompute))
    saved_first, saved_second = _halves(saved)
    return max(0.0, first - saved_first), max(0.0, second - saved_second)


def _expert_backward(local: LocalSizes, layer: Layer, saved: Terms, delays: bool) -> float:
    """Bytes in the experts' backward. Delayed weight gradients are made while the rows' gradients travel back: then
    these are there as they were sent and as they arrive, gradients of results and of FC1's output, and the inputs of
    the GEMMs."""
    transient = max(moe_backward_steps(local, shared_is_later=True).values())
    if local.model.moe is None or not delays:
        return transient
    rows, row = MoeRows(local), local.element_bytes * local.model.dim * local.tokens
    # Fused experts make the activation once more; others have saved it.
    kept = rows.hidden if local.uses_fused_experts else 0.0
    freed = saved.get("experts", 0.0) - (0.0 if kept else rows.hidden)
    sent = rows.received_tokens if rows.dispatcher == "deepep" else rows.received
    wgrad = row + rows.gathered + sent + exchange_bytes(local).grads_back + 2 * rows.hidden + kept - max(0.0, freed)
    wgrad += wgrad_transients(local, layer)
    return max(*moe_backward_steps(local, delays_wgrad=True, shared_is_later=True).values(), wgrad)


def _halves(terms: Terms) -> tuple[float, float]:
    """Bytes of a layer before its first stop, and after it."""
    first, second = _half_terms(terms)
    return sum(first.values()), sum(second.values())


def _half_terms(terms: Terms) -> tuple[Terms, Terms]:
    second = {name: size for name, size in terms.items() if name in _AFTER_DISPATCH}
    return {name: size for name, size in terms.items() if name not in second}, second


def _negative(terms: Terms) -> Terms:
    return {name: -size for name, size in terms.items()}
