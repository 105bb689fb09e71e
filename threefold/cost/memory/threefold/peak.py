"""The search for the peak of a pipeline rank in our own engine, over its schedule and inside each pass.

`model.py` makes one `PeakFinder` per plan and calls `find` per stage. A peak is the sum of what the microbatches in
flight hold at a `ScheduleMoment`, delayed weight gradients, gradients that are there already, and one `PeakPoint` on
top.

Mirrors `engine/schedule/microbatch_runners.py`, `engine/models/pipeline_chunk.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter, mul

from threefold.cost.memory.stage_memory import Terms, add_terms
from threefold.cost.memory.threefold.delayed_wgrad import (
    chunk_wgrad_bytes,
    splits_backward,
    splits_some_backwards,
    wgrad_transients,
)
from threefold.cost.memory.threefold.fsdp import fsdp_units, only_chunk, root_points
from threefold.cost.memory.threefold.graphs.pools import num_inputs_in_graphs
from threefold.cost.memory.threefold.layer_points import chunk_features, layer_points, layer_tables
from threefold.cost.memory.threefold.local_sizes import FP32, LocalSizes
from threefold.cost.memory.threefold.offloaded import NOTHING_OFFLOADED, OffloadedActivations
from threefold.cost.memory.threefold.peak_points import NO_LAYER, PeakPoint, at_chunk_end, layer_positions
from threefold.cost.memory.threefold.schedule import NO_CHUNK, ScheduleMoment, fullest_moments
from threefold.cost.memory.threefold.states import head_gradient_bytes, late_gradient_bytes
from threefold.cost.memory.threefold.timelines.pipeline_buffers import PipelineBuffers
from threefold.cost.memory.threefold.transients import embedding_transients, loss_transients, optimizer_transients
from threefold.cost.stage_contents import StageContents, chunk_layers
from threefold.cost.vision import vision_saved_bytes
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import Layer
from threefold.units import MIB

LIBRARY_BYTES = 2 * 32 * MIB  # cuBLAS workspaces on Hopper, one for the forward and one for the backward


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of one pipeline rank: when it occurs and what is there."""

    moment: ScheduleMoment
    point: PeakPoint
    missing_gradients: float  # bytes of gradients that do not exist yet
    also: Terms  # delayed weight gradients, HSDP's reduced shards, another chunk's loss, and libraries

    @property
    def text(self) -> str:
        """When the peak occurs, as it is printed."""
        if self.point.pass_name == "optimizer":
            return self.point.name
        return f"{self.point.name}, with all microbatches in flight"

    def add_to(self, terms: Terms) -> None:
        """Add the bytes of this moment to terms that hold states and saved activations."""
        terms["gradients"] -= self.missing_gradients
        for name, size in self.point.freed.items():
            terms[name] = terms.get(name, 0.0) - size
        for name, size in (*self.point.added.items(), *self.also.items()):
            terms[name] = terms.get(name, 0.0) + size
        terms |= without_negative(terms)


class PeakFinder:
    """Finds the peak of every stage of one plan. Stages with equal chunks share what was computed for them."""

    def __init__(
        self,
        plan: Plan,
        saved: dict[Layer, Terms],
        offloaded: Mapping[Layer, OffloadedActivations],
        skew: float,
        uses_graphs: bool = False,
    ) -> None:
        """`saved` is what each kind of layer keeps on the device, `offloaded` what it keeps on the host. All passes may
        use graphs."""
        self.plan, self.local, self.saved, self.offloaded = plan, LocalSizes(plan, skew), saved, offloaded
        self.uses_graphs = uses_graphs
        self.splits_backward, self.vision_bytes = splits_backward(plan), vision_saved_bytes(plan)
        kinds = (False, True) if splits_some_backwards(plan) else (self.splits_backward,)
        # By whether a backward delays its weight gradients.
        self.tables = {splits: layer_tables(self.local, saved, offloaded, splits, uses_graphs) for splits in kinds}
        self._points: dict[object, list[tuple[float, PeakPoint]]] = {}

    def find(self, stage: int, contents: StageContents, gradients: float) -> Peak:
        """The peak of one stage with so many bytes of gradients."""
        layers = [chunk_layers(self.plan, chunk) for chunk in contents.chunks]
        saved = [sum(sum(self.saved[layer].values()) for layer in chunk) for chunk in layers]
        saved = [size + held for size, held in zip(saved, self.held_inputs(contents), strict=True)]
        saved = [
            size + self.vision_bytes if chunk.embedding else size
            for size, chunk in zip(saved, contents.chunks, strict=True)
        ]
        wgrad = [
            chunk_wgrad_bytes(self.local, chunk, self.tables[True].wgrad) if True in self.tables else 0.0
            for chunk in contents.chunks
        ]
        head = head_gradient_bytes(self.local, contents)
        body = max(0.0, late_gradient_bytes(self.local, contents, gradients) - head)
        parts = [body * len(chunk) / max(1, sum(map(len, layers))) for chunk in layers]
        are_late, row = bool(body or head), self.local.residual_bytes
        points: dict[tuple[int, str, bool], list[tuple[float, PeakPoint]]] = {}
        casts_shards, at_model_end = self.local.reduced_bytes != FP32, self._at_model_end(contents)
        best: tuple[float, Peak] | None = None
        buffers, moments = PipelineBuffers(self.plan, stage, contents), fullest_moments(self.plan, stage)
        num_chunks = len(moments[0][0][1].in_flight)  # as many as the layout asks for; the model may have fewer
        states, gradient_rows = ([row * count for count in counts] for counts in buffers.by_chunk(num_chunks))
        # In the order of the counts of a moment.
        sizes = [*_padded(saved, num_chunks), *states, *gradient_rows, *_padded(wgrad, num_chunks)]
        for alike in moments:
            base, moment = max(((sum(map(mul, counts, sizes)), one) for counts, one in alike), key=itemgetter(0))
            base += row * buffers.received
            pending = sum(map(mul, moment.pending_wgrad, wgrad))
            # A late gradient takes memory from the first backward of its chunk on.
            to_come = parts
            if are_late:
                to_come = [0.0 if done else part for part, done in zip(parts, moment.finished, strict=False)]
            head_to_come = head if are_late and not moment.finished[-1] else 0.0
            missing = sum(to_come) + head_to_come
            for number, pass_name in moment.passes:
                splits = self.splits_backward or moment.is_split
                if (number, pass_name, splits) not in points:
                    found = self._chunk_points(contents, number, pass_name, are_late, splits)
                    points[number, pass_name, splits] = found
                others = [held for at, held in enumerate(at_model_end) if at != number and moment.in_flight[at]]
                of_others = sum(sum(held.values()) for held in others)
                for net_bytes, point in points[number, pass_name, splits]:
                    made = to_come[number] * point.done_fraction + head_to_come * point.after_head
                    reduced = point.reduced_shards if moment.finished[number] or casts_shards else 0.0
                    total = base - missing + net_bytes + made + reduced + of_others
                    if best is None or total > best[0]:
                        also = add_terms([*others, {"workspace": pending + reduced + self._library_bytes}])
                        best = total, Peak(moment, point, missing - made, also)
        assert best is not None
        return self._or_optimizer_step(contents, *best)

    def held_inputs(self, contents: StageContents) -> list[float]:
        """Bytes that each chunk holds of inputs for one microbatch, if nothing else counts them, less those of layers'
        inputs that lie in graphs."""
        held, row = [], self.local.residual_bytes
        for chunk in contents.chunks:
            first = next(iter(chunk_layers(self.plan, chunk)), NO_LAYER)
            received = self.offloaded.get(first, NOTHING_OFFLOADED).received_input_bytes(self.local, chunk)
            # Features of pictures come in one tensor with the hidden states that the first norm saves.
            features = chunk_features(self.plan, chunk)
            held.append(received + features.num_received * features.row)
            if self.uses_graphs:
                held[-1] -= row * num_inputs_in_graphs(self.plan, chunk_layers(self.plan, chunk))
        return held

    @property
    def _library_bytes(self) -> float:
        return LIBRARY_BYTES if self.local.has_fused_kernels else 0.0

    def _or_optimizer_step(self, contents: StageContents, peak_bytes: float, peak: Peak) -> Peak:
        """The peak of the passes, or the optimizer's step where that needs more."""
        step_bytes = optimizer_transients(self.local, contents)
        if step_bytes <= peak_bytes:
            return peak
        none = (0,) * len(contents.chunks)
        after = ScheduleMoment(none, NO_CHUNK, NO_CHUNK, none, none)
        point = PeakPoint("the optimizer's step", "optimizer", {"workspace": step_bytes})
        return Peak(after, point, 0.0, {"workspace": self._library_bytes})

    def _chunk_points(
        self, contents: StageContents, number: int, pass_name: str, are_late: bool, splits: bool
    ) -> list[tuple[float, PeakPoint]]:
        """The points of a pass through a chunk with their net bytes. Where no gradients come late the largest one is
        enough."""
        chunk = contents.chunks[number]
        layers = chunk_layers(self.plan, chunk)
        ends = contents.embedding, contents.mtp, contents.loss
        features = chunk_features(self.plan, chunk)
        key = layers, chunk.embedding, chunk.mtp, chunk.loss, *ends, are_late, splits, features
        if (key, pass_name) not in self._points:
            points = [(point.net_bytes, point) for point in self._all_points(contents, number, splits)]
            for each in ("forward", "backward", *(("wgrad",) if splits else ())):
                these = [one for one in points if one[1].pass_name == each]
                self._points[key, each] = these if are_late else [max(these, key=lambda one: one[0])]
        return self._points[key, pass_name]

    def _all_points(self, contents: StageContents, number: int, splits: bool) -> list[PeakPoint]:
        """The points of all passes through a chunk."""
        local, chunk = self.local, contents.chunks[number]
        # Another chunk's end of the model counts as sharded here: its backward follows right after its forward.
        contents = replace(contents, mtp=chunk.mtp, loss=chunk.loss)
        is_alone = self.plan.layout.gpus == 1 and self.plan.num_microbatches == 1
        points = _loss_points(local, contents) if chunk.loss else []
        positions = layer_positions(self.plan, chunk)
        for position in positions:
            points += layer_points(self.tables[splits], contents, chunk, position)
        saved = add_terms(self.saved[layer] for layer in chunk_layers(self.plan, chunk))
        if self.plan.knobs.data_parallel != "zero1":
            points += root_points(local, fsdp_units(self.plan, contents, positions[0]), chunk, saved)
        elif chunk.embedding and "embedding" in local.saved_inputs:
            pending = chunk_wgrad_bytes(local, chunk, self.tables[splits].wgrad) if splits else 0.0
            # On one GPU the gradient that is made here is the one that stays.
            table = local.element_bytes * local.model.vocab * local.model.dim if is_alone else 0.0
            waiting = chunk_features(self.plan, chunk).gradients(0)
            size = {"workspace": embedding_transients(local, chunk.mtp > 0) + pending + waiting - table}
            points.append(PeakPoint("the embedding's backward", "backward", size, saved, 1.0, after_head=True))
        points += _picture_points(self.plan, contents, chunk, saved)
        if splits:
            most = max(wgrad_transients(local, position.layer) for position in positions)
            points.append(PeakPoint("gradients of weights that waited", "wgrad", {"workspace": most}, {}, 1.0))
        return points

    def _at_model_end(self, contents: StageContents) -> list[Terms]:
        """What a microbatch holds between its forward and its backward at the end of the model, by the chunk that it is
        in, while another chunk is at work: gradients of the hidden states and of the output layer, and the gathered
        root."""
        held: list[Terms] = []
        for chunk in contents.chunks:
            terms: Terms = {}
            if chunk.loss:
                terms["logits"] = loss_transients(self.local, 1 + self.plan.mtp).saved
            if (chunk.loss or chunk.mtp) and self.plan.knobs.data_parallel != "zero1":
                root = fsdp_units(self.plan, only_chunk(chunk), at_chunk_end()).root
                terms["workspace"] = self.local.element_bytes * root
            held.append(terms)
        return held


def without_negative(terms: Terms) -> Terms:
    """The terms where more was freed than a term holds: the workspace takes the difference."""
    negative = {name: size for name, size in terms.items() if size < 0}
    return add_terms([terms, {name: -size for name, size in negative.items()}, {"workspace": sum(negative.values())}])


def _padded(sizes: list[float], count: int) -> list[float]:
    return [*sizes, *[0.0] * (count - len(sizes))]


def _picture_points(plan: Plan, contents: StageContents, chunk: Chunk, saved: Terms) -> list[PeakPoint]:
    """The points at which features of pictures are put at their tokens, and at which their gradients come back. `saved`
    are the activations of the chunk's layers for one microbatch."""
    features, root = chunk_features(plan, chunk), 0.0
    if not features.whole:
        return []
    if plan.knobs.data_parallel != "zero1":
        root = LocalSizes(plan).element_bytes * fsdp_units(plan, contents, at_chunk_end()).root
    placing = {"workspace": features.while_placing + root}
    points = [PeakPoint("the pictures' features", "forward", placing, saved)]
    if chunk.mtp:
        placing = {"workspace": features.while_placing_ahead + root}
        points.append(PeakPoint("the pictures' features for MTP", "forward", placing))
    if features.backward:
        size = {"workspace": features.backward + root}
        points.append(PeakPoint("the pictures' backward", "backward", size, saved, 1.0, after_head=True))
    return points


def _loss_points(local: LocalSizes, contents: StageContents) -> list[PeakPoint]:
    loss, root = loss_transients(local, 1 + local.plan.mtp), 0.0
    if local.plan.knobs.data_parallel != "zero1":
        root = local.element_bytes * fsdp_units(local.plan, contents, at_chunk_end()).root
    backward = {"logits": loss.saved, "workspace": loss.cast + root}
    return [
        PeakPoint("the loss", "forward", {"logits": loss.held, "workspace": loss.peak - loss.held + root}),
        # On one GPU the gradient that is made here is the one that stays.
        PeakPoint("the loss's backward", "backward", backward, after_head=local.plan.layout.gpus > 1),
    ]
