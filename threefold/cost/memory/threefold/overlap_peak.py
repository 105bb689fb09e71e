"""The peak of a pipeline rank of our own engine under EP overlap, where a forward and a backward alternate.

A pass stops where it has started an exchange of an MoE layer; there the other pass goes on until its own next stop. So
the backward frees, one segment at a time, what the forward allocates, and the peak of a pair is above its start by
about one segment. `model.py` calls `find_overlap_peak` for each stage with pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.activations import recomputed_activations
from threefold.cost.memory.threefold.delayed_wgrad import delayed_wgrad_bytes, dgrad_transients, wgrad_transients
from threefold.cost.memory.threefold.fsdp import fsdp_units, quantized_expert_bytes
from threefold.cost.memory.threefold.local_sizes import FP32, INT64, LocalSizes
from threefold.cost.memory.threefold.overlap_pairs import OverlapPair, stage_overlap_pairs
from threefold.cost.memory.threefold.peak_points import NO_LAYER, LayerPosition
from threefold.cost.memory.threefold.transients import (
    ffn_backward_transients,
    forward_transients,
    loss_transients,
    mixer_backward_transients,
)
from threefold.cost.stage_contents import StageContents, chunk_layers
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
    exchange: float = 0.0  # bytes of the exchange that is in flight after it
    delayed_wgrad: float = 0.0  # bytes kept for weight gradients until the forward's next stop
    name: str = MERGED_PASS


@dataclass(frozen=True, slots=True)
class GatheredBytes:
    """Bytes of FSDP's gathered units around a layer, and of their reductions in fp32; all 0 under ZeRO-1."""

    root: float = 0.0
    layer: float = 0.0  # the layer without its routed experts
    experts: float = 0.0
    root_fp32: float = 0.0
    layer_fp32: float = 0.0
    experts_fp32: float = 0.0
    expert_grads: float = 0.0  # the experts' gradients as the backward makes them
    quantized_experts: float = 0.0  # FP8 copies of the experts


def find_overlap_peak(
    plan: Plan, stage: int, chunks: Sequence[Chunk], saved: SavedByLayer, skew: float
) -> tuple[OverlapPair, float, str]:
    """The pair with the highest peak, the bytes of that peak above the microbatches in flight, and its name."""
    local = LocalSizes(plan, skew)
    chunk_bytes = [_chunk_activations(local, chunk, saved) for chunk in chunks]
    recomputed = {layer: _recomputed_halves(local, layer, saved[layer]) for layer in saved}
    forwards = [[*_forward_segments(local, chunk, saved)] for chunk in chunks]
    backwards = [[*_backward_segments(local, chunk, saved, recomputed)] for chunk in chunks]
    alone = [_forward_alone(local, chunk) for chunk in chunks]

    def above(pair: OverlapPair) -> tuple[float, str]:
        if pair.forward_chunk is None:
            return max(_alternate(backwards[pair.backward_chunk], []), alone[pair.backward_chunk])
        return _alternate(backwards[pair.backward_chunk], forwards[pair.forward_chunk])

    def total(pair: OverlapPair) -> float:
        held = sum(count * size for count, size in zip(pair.in_flight, chunk_bytes, strict=True))
        return held + above(pair)[0]

    pair = max(stage_overlap_pairs(plan, stage), key=total)
    return pair, *above(pair)


def _alternate(backward: Sequence[Segment], forward: Sequence[Segment]) -> tuple[float, str]:
    """The peak of two passes in alternation, above what both hold at their start, and its name."""
    exchanges, wgrad, level, most = [0.0, 0.0], 0.0, 0.0, (0.0, "")
    for segments in zip_longest(backward, forward, fillvalue=Segment()):
        for index, segment in enumerate(segments):
            most = max(most, (level + wgrad + exchanges[1 - index] + segment.peak, segment.name))
            level, exchanges[index] = level + segment.change, segment.exchange
            wgrad = 0.0 if index else segment.delayed_wgrad
    return most


def _forward_alone(local: LocalSizes, chunk: Chunk) -> tuple[float, str]:
    """Bytes at the end of a forward that runs without a backward."""
    most = max(forward_transients(local, layer) for layer in chunk_layers(local.plan, chunk) or [NO_LAYER])
    if num_heads := chunk.loss + chunk.mtp:
        loss = loss_transients(local, num_heads)[0] + _gathered(local, chunk).root
        return max((most, "a forward"), (loss, "the loss"))
    return most, "a forward"


def _chunk_activations(local: LocalSizes, chunk: Chunk, saved: SavedByLayer) -> float:
    """What one microbatch holds in a chunk."""
    row = local.element_bytes * local.model.dim * local.tokens
    ends = chunk.mtp * 5 * row + (row if chunk.loss else 0.0)
    ends += 2 * INT64 * local.gathered_tokens if chunk.embedding else 0.0
    return sum(sum(saved[layer].values()) for layer in chunk_layers(local.plan, chunk)) + ends


def _forward_segments(local: LocalSizes, chunk: Chunk, saved: SavedByLayer) -> Iterator[Segment]:
    exchange, peak, change = _exchange_bytes(local), 0.0, 0.0
    for layer in chunk_layers(local.plan, chunk):
        units, (first, second) = _gathered(local, chunk, layer), _halves(saved[layer])
        gathered = units.root + units.layer
        change += first
        if layer.ffn == "moe":
            yield Segment(max(peak, change + exchange + gathered), change, exchange)
            # Weights are gathered into one buffer and copied out of it; the buffer outlives the copies. GEMMs in low
            # precision do not save the rows they read, which stay until then.
            read = exchange if local.quantized_bytes else 0.0
            transient = second + max(forward_transients(local, layer), exchange / 2 + read + units.experts)
            peak_bytes = transient + gathered + units.experts + units.quantized_experts
            yield Segment(peak_bytes, second, exchange)
            peak = change = 0.0
        else:
            change += second
            peak = max(peak, change + forward_transients(local, layer) + gathered)
    name, num_heads = MERGED_PASS, chunk.loss + chunk.mtp
    if num_heads:
        loss, kept = loss_transients(local, num_heads)
        loss += _gathered(local, chunk).root
        name = "the loss" if change + loss >= peak else name
        peak, change = max(peak, change + loss), change + kept
    yield Segment(max(peak, change), change, name=name)


def _backward_segments(
    local: LocalSizes, chunk: Chunk, saved: SavedByLayer, recomputed: dict[Layer, tuple[float, float]]
) -> Iterator[Segment]:
    """`recomputed` is what each layer makes again, before its first stop and after it."""
    exchange, name, peak, change, wgrad = _exchange_bytes(local), MERGED_PASS, 0.0, 0.0, 0.0
    table = local.element_bytes * local.model.vocab / local.tp * local.model.dim
    units = _gathered(local, chunk)
    if num_heads := chunk.loss + chunk.mtp:
        name = "the loss's backward"
        hidden = local.element_bytes * local.model.dim * local.gathered_tokens
        peak = loss_transients(local, num_heads)[1] + table + hidden + units.root
    delays = local.plan.knobs.delay_wgrad and local.plan.knobs.data_parallel == "zero1"
    held = table if units.root and num_heads else 0.0  # the head's gradient waits for that of the embedding
    reducing = held
    layers = chunk_layers(local.plan, chunk)
    for number, layer in reversed([*enumerate(layers)]):
        units, (first, second) = _gathered(local, chunk, layer), _halves(saved[layer])
        gathered, (first_made, second_made) = units.root + units.layer, recomputed[layer]
        if layer.ffn == "moe":
            yield Segment(max(peak, exchange), change, exchange + reducing, wgrad, name)
            experts = _expert_backward(local, layer, saved[layer], delays) + second_made
            transient = max(experts, exchange + units.experts) + units.experts
            transient += units.quantized_experts
            reduction = units.experts_fp32 + units.expert_grads - second
            in_flight = exchange + units.experts_fp32 + held
            yield Segment(max(transient, reduction) + reducing + gathered, -second, in_flight)
            name, change = MERGED_PASS, -first
            previous = _gathered(local, chunk, layers[number - 1]).layer if number else 0.0
            mixer = mixer_backward_transients(local, layer)
            peak = mixer + first_made + gathered + units.experts_fp32 + previous + held
            wgrad, reducing = _delayed_bytes(local, layer) if delays else 0.0, units.layer_fp32 + held
        else:
            ffn = ffn_backward_transients(local, layer)
            peak = max(peak, change + ffn + first_made + second_made + gathered + held)
            change -= first + second
            wgrad += _delayed_bytes(local, layer) if delays else 0.0
    uses = chunk.embedding + chunk.mtp  # each use makes a gradient of the whole table, and they are added
    end = wgrad + max(table * (uses + 1 if uses > 1 else uses), units.root_fp32 + units.root)
    yield Segment(max(peak, change + end), change, name=name)


def _gathered(local: LocalSizes, chunk: Chunk, layer: Layer = NO_LAYER) -> GatheredBytes:
    """What FSDP gathers and reduces around a layer of a chunk."""
    if local.plan.knobs.data_parallel == "zero1":
        return GatheredBytes()
    contents, b = StageContents((chunk,), (), chunk.embedding, chunk.mtp, chunk.loss), local.element_bytes
    position = LayerPosition(layer, (), None, is_before_loss=False, is_before_mtp=False, done_fraction=0.0)
    units = fsdp_units(local.plan, contents, position)
    return GatheredBytes(
        root=b * units.root,
        layer=b * units.layer,
        experts=b * units.padded_experts,
        root_fp32=FP32 * units.root,
        layer_fp32=FP32 * units.layer,
        experts_fp32=FP32 * units.padded_experts,
        expert_grads=b * units.experts,
        quantized_experts=quantized_expert_bytes(local, units),
    )


def _recomputed_halves(local: LocalSizes, layer: Layer, saved: Terms) -> tuple[float, float]:
    """What recompute makes of a layer, before its first stop and after it."""
    if not local.recompute:
        return 0.0, 0.0
    first, second = _halves(recomputed_activations(local, layer, local.without_recompute))
    saved_first, saved_second = _halves(saved)
    return max(0.0, first - saved_first), max(0.0, second - saved_second)


def _expert_backward(local: LocalSizes, layer: Layer, saved: Terms, delays: bool) -> float:
    """Bytes in the experts' backward. Delayed weight gradients are made while the rows' gradients travel back: then the
    received and sent gradients are there, FC1's output gradients, and the inputs of the GEMMs."""
    transient, moe = ffn_backward_transients(local, layer), local.model.moe
    if moe is None or not delays:
        return transient
    hidden = local.element_bytes * moe.expert_dim / local.plan.layout.etp * local.expert_rows
    rows = local.element_bytes * local.model.dim * local.expert_rows
    freed = max(0.0, saved.get("experts", 0.0) - hidden)
    wgrad = rows + _exchange_bytes(local) + 2 * hidden + wgrad_transients(local, layer) - freed
    return max(dgrad_transients(local, layer), wgrad)


def _halves(terms: Terms) -> tuple[float, float]:
    """Bytes of a layer before its first stop, and after it."""
    second = sum(terms.get(name, 0.0) for name in _AFTER_DISPATCH)
    return sum(terms.values()) - second, second


def _exchange_bytes(local: LocalSizes) -> float:
    """An exchange in flight: rows as they were sent, and as they are received."""
    rows = local.dispatched_rows + local.expert_rows / local.plan.layout.etp
    return local.element_bytes * local.model.dim * rows


def _delayed_bytes(local: LocalSizes, layer: Layer) -> float:
    """What a layer keeps for delayed weight gradients; those of experts are made at once."""
    wgrad = delayed_wgrad_bytes(local, layer)
    return wgrad.mixer + wgrad.dense
