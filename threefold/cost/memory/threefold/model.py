"""The memory model of our own engine: states, activations of microbatches in flight, and the peak of a step.

`memory/by_stack.py` uses it for plans with `target = "threefold"`. Without EP overlap `peak.py` searches the schedule
for the peak; with EP overlap `overlap_peak.py` does, because a forward and a backward then hold memory at the same
time.

Mirrors `engine/schedule/microbatch_runners.py`, `engine/models/inputs.py`, `engine/layers/embedding.py`,
`engine/layers/rope.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from threefold.cost.memory.stage_memory import StagePeak, Terms, add_terms, layer_kinds
from threefold.cost.memory.threefold.activations import layer_activations
from threefold.cost.memory.threefold.graphs.pools import (
    WHOLE,
    gradients_in_graphs,
    graph_pools,
    graphed_fraction,
    outside_graphs,
)
from threefold.cost.memory.threefold.local_sizes import FP32, INT64, LocalSizes, for_layer
from threefold.cost.memory.threefold.offloaded import OffloadedActivations, offloaded_activations
from threefold.cost.memory.threefold.overlap_peak import OverlapPeakFinder
from threefold.cost.memory.threefold.peak import LIBRARY_BYTES, PeakFinder, without_negative
from threefold.cost.memory.threefold.states import state_terms
from threefold.cost.memory.threefold.timelines.pipeline_buffers import PipelineBuffers
from threefold.cost.memory.threefold.transients import optimizer_transients
from threefold.cost.stage_contents import StageContents, chunk_layers, first_gradient_in, stage_contents
from threefold.cost.trained_weights import first_gradient
from threefold.cost.vision import vision_saved_bytes
from threefold.plan.plan import Plan
from threefold.spec.model import Layer


class ThreefoldMemory:
    """Implements `MemoryModel` for our own engine."""

    def layer_activation_bytes(self, plan: Plan, layer: Layer, skew: float) -> Terms:
        local = LocalSizes(plan, skew)
        return _device_activations(local, layer, offloaded_activations(local, layer))

    def stage_peaks(self, plan: Plan, skew: float) -> Iterator[StagePeak]:
        kinds = layer_kinds(plan)
        local = LocalSizes(plan, skew)
        offloaded = {layer: offloaded_activations(local, layer) for layer in kinds}
        saved = {layer: _device_activations(local, layer, offloaded[layer]) for layer in kinds}
        finders: dict[float, PeakFinder | OverlapPeakFinder] = {}  # by the part of the microbatches that has graphs
        for stage, contents in enumerate(stage_contents(plan)):
            pools = graph_pools(plan, stage, contents, saved)
            fraction = graphed_fraction(plan, pools) if pools.num_bytes else 0.0
            held = fraction * pools.num_bytes
            if fraction not in finders:
                outside = outside_graphs(plan, saved, fraction) if fraction else saved
                if plan.knobs.ep_overlap:
                    finders[fraction] = OverlapPeakFinder(plan, outside, skew)
                else:
                    finders[fraction] = PeakFinder(plan, outside, offloaded, skew, fraction == 1.0)
            finder = finders[fraction]
            if isinstance(finder, OverlapPeakFinder):
                yield _overlap_peak(finder, stage, contents, held)
            else:
                peak = _sequential_peak(finder, stage, contents, held)
                if WHOLE not in plan.knobs.graphs or not held:
                    yield peak
                elif plan.block_factor is None:
                    yield _whole_graph(finder, contents, held, peak)
                else:
                    yield _graph_of_blocks(plan, stage, contents, offloaded, peak)


def _sequential_peak(finder: PeakFinder, stage: int, contents: StageContents, graph_bytes: float) -> StagePeak:
    """The peak of a rank whose passes run one after the other."""
    plan, terms = finder.plan, state_terms(finder.plan, contents)
    if WHOLE not in plan.knobs.graphs:
        terms["gradients"] -= gradients_in_graphs(plan, contents)
    peak = finder.find(stage, contents, terms["gradients"])
    moment = peak.moment
    add_stage_activations(plan, stage, contents, finder.saved, terms, moment.in_flight, moment.finished)
    held = zip(moment.in_flight, finder.held_inputs(contents), strict=True)
    terms["norms"] += sum(count * size for count, size in held)
    add_vision(plan, contents, terms, moment.in_flight)
    peak.add_to(terms)
    terms["graphs"] = graph_bytes
    return StagePeak(terms, peak.text)


def _whole_graph(finder: PeakFinder, contents: StageContents, graph_bytes: float, eager: StagePeak) -> StagePeak:
    """The peak of a rank whose whole microbatch is a graph: nothing but states and the optimizer's step is outside."""
    plan, states = finder.plan, state_terms(finder.plan, contents)
    made = sum(size for name, size in eager.terms.items() if name not in (*states, "graphs"))
    terms = states | {"graphs": max(graph_bytes, made)}
    terms["gradients"] -= gradients_in_graphs(plan, contents)
    terms["workspace"] = LIBRARY_BYTES + optimizer_transients(finder.local, contents)
    return StagePeak(terms, "the optimizer's step")


def _graph_of_blocks(
    plan: Plan, stage: int, contents: StageContents, offloaded: dict[Layer, OffloadedActivations], eager: StagePeak
) -> StagePeak:
    """The same where the graph holds rows in blocks of a fixed size: a microbatch whose rows exceed them is run again
    as `eager`, next to the graph's memory."""
    assert plan.block_factor is not None
    local = LocalSizes(plan, plan.block_factor)
    saved = {layer: _device_activations(local, layer, each) for layer, each in offloaded.items()}
    finder, pool = PeakFinder(plan, saved, offloaded, local.skew, True), graph_pools(plan, stage, contents, saved)
    in_graph = _sequential_peak(finder, stage, contents, pool.num_bytes)
    whole = _whole_graph(finder, contents, pool.num_bytes, in_graph)
    again = replace(eager, terms=eager.terms | {"graphs": whole.terms["graphs"]})
    return max(whole, again, key=lambda peak: sum(peak.terms.values()))


def _device_activations(local: LocalSizes, layer: Layer, offloaded: OffloadedActivations) -> Terms:
    """Activations that a layer keeps on the device, without the offloaded ones."""
    saved, on_host = layer_activations(for_layer(local, layer), layer), offloaded.terms
    return {name: size - on_host.get(name, 0.0) for name, size in saved.items()}


def add_vision(plan: Plan, contents: StageContents, terms: Terms, in_flight: Sequence[int]) -> None:
    """Add what encoder and projector of pictures save for the microbatches in flight of the first chunk."""
    for chunk, count in zip(contents.chunks, in_flight, strict=False):
        if chunk.embedding and plan.is_vlm:
            terms["vision"] = vision_saved_bytes(plan) * count


def _overlap_peak(finder: OverlapPeakFinder, stage: int, contents: StageContents, graph_bytes: float) -> StagePeak:
    """The peak of a rank on which EP overlap runs pairs of passes."""
    plan, saved = finder.plan, finder.saved
    terms = state_terms(plan, contents)
    peak = finder.find(stage, contents, terms["gradients"])
    moment = peak.name
    add_stage_activations(plan, stage, contents, saved, terms, peak.pair.in_flight, peak.pair.finished)
    add_vision(plan, contents, terms, peak.pair.in_flight)
    terms["gradients"] -= peak.missing_gradients
    terms["graphs"] = graph_bytes
    libraries = LIBRARY_BYTES if plan.chip.architecture != "cpu" else 0.0
    terms = without_negative(add_terms([terms, peak.above, {"workspace": libraries}]))
    after = state_terms(plan, contents) | {"workspace": libraries}
    after["graphs"] = graph_bytes
    after["workspace"] += optimizer_transients(finder.local, contents)
    if sum(after.values()) > sum(terms.values()):
        return StagePeak(after, "the optimizer's step")
    return StagePeak(terms, moment)


def add_stage_activations(
    plan: Plan,
    stage: int,
    contents: StageContents,
    saved: dict[Layer, Terms],
    terms: Terms,
    in_flight: Sequence[int],
    finished: Sequence[int],
) -> None:
    """Add to `terms` the activations of every microbatch in flight, and the token ids of the whole step.

    `saved` is what each kind of layer saves on the device, `in_flight` the microbatches by chunk, and `finished` those
    whose backward is over.
    """
    local = LocalSizes(plan)
    b, dim, t = local.element_bytes, plan.model.dim, local.tokens
    for chunk, count in zip(contents.chunks, in_flight, strict=False):
        for layer in (layers := chunk_layers(plan, chunk)):
            for name, value in saved[layer].items():
                terms[name] = terms.get(name, 0.0) + value * count
        terms["attention"] = terms.get("attention", 0.0) + _rope_tables(local, layers) * count
        # An MTP depth saves the next token's embedding and the hidden state, the norms of both side by side, and the
        # input of its last norm.
        is_norm_input = chunk.embedding and bool(layers) and first_gradient_in(layers[0]) == "input"
        embedded = b * dim * t * (chunk.mtp + is_norm_input)
        final_norm = (local.residual_bytes + (b * dim * t if local.model.streams else 0.0)) * chunk.loss
        ends = chunk.mtp * b * dim * t * 5 + final_norm - embedded
        # The first norm saves an embedding without a gradient only for a gradient of its own, or to be recomputed.
        is_recomputed = bool(local.recompute & {"layernorm", "full"})
        if is_norm_input and first_gradient(plan) == (0, "mixer") and not is_recomputed:
            embedded -= b * dim * t
        terms["norms"] = terms.get("norms", 0.0) + ends * count
        terms["embedding"] = terms.get("embedding", 0.0) + embedded * count
        if chunk.embedding:
            terms["embedding"] += 2 * INT64 * local.gathered_tokens * count
    num_buffers = PipelineBuffers(plan, stage, contents).count(in_flight, finished)
    terms["workspace"] = terms.get("workspace", 0.0) + num_buffers * local.residual_bytes
    step_tokens = plan.job.micro_batch * plan.job.seq_len
    terms["embedding"] = terms.get("embedding", 0.0) + 2 * INT64 * step_tokens * max(1, plan.num_microbatches)


def _rope_tables(local: LocalSizes, layers: Sequence[Layer]) -> float:
    """Cosine and sine of the rotary embedding in fp32, which all layers of a kind share."""
    dims = sum(spec.rope_dim for spec in {local.model.attention_of(layer) for layer in layers} if spec)
    return FP32 * dims * local.gathered_tokens
