"""What the memory models of both stacks share: their result by stage, their interface, microbatches in flight.

A result reads `Memory(stages=(StageMemory(stage=0, peak_bytes=6.1e10, terms={"weights": 9.8e9, ...}, moment="a
backward, ...", device_bytes=6.7e10, reserve={"slack": 3.7e9, ...}), ...))`. Term names are those of `plan/terms.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from threefold.cost.stage_contents import StageContents, chunk_layers
from threefold.layout.degrees import num_dynamic_groups
from threefold.plan.plan import Plan
from threefold.spec.model import Layer
from threefold.units import GIB, MIB

Terms = dict[str, float]  # bytes by memory term

CONTEXT_BYTES = 1.6 * GIB  # CUDA context and libraries
ALLOCATOR_SLACK = 0.06  # reserved beyond the allocator's peak, as a fraction of it: published runs show 2 to 10 %
COMMUNICATOR_BYTES = 64 * MIB  # NCCL buffers of one communicator


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one pipeline rank at its peak."""

    stage: int  # the pipeline rank
    peak_bytes: float  # the allocator's peak, the sum of `terms`
    terms: dict[str, float]
    moment: str  # when the peak occurs
    device_bytes: float  # `peak_bytes` and what the device holds outside the allocator, the sum of `reserve`
    reserve: dict[str, float]

    @property
    def by_size(self) -> list[tuple[str, float]]:
        """All terms, inside and outside the allocator, the largest first."""
        return sorted({**self.terms, **self.reserve}.items(), key=lambda term: -term[1])

    def device_bytes_at(self, band: float) -> float:
        """The device's bytes if the allocator's peak were so much higher, as a fraction."""
        return self.device_bytes + band * self.peak_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of all pipeline ranks."""

    stages: tuple[StageMemory, ...]

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.device_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.worst.peak_bytes

    @property
    def device_bytes(self) -> float:
        return self.worst.device_bytes


@dataclass(frozen=True, slots=True)
class StagePeak:
    """The peak of one pipeline rank as a stack's model finds it."""

    terms: Terms
    moment: str
    graph_pool_bytes: float = 0.0  # attention in the pools of CUDA graphs, which the allocator's peak does not count


class MemoryModel(Protocol):
    """The memory of one stack. `memory/by_stack.py` picks the model of a plan's target.

    `skew` is the number of tokens at the busiest expert rank over the balanced number.
    """

    def layer_activation_bytes(self, plan: Plan, layer: Layer, skew: float) -> Terms:
        """Activations that one layer saves on the device from forward to backward of one microbatch."""

    def stage_peaks(self, plan: Plan, skew: float) -> Iterable[StagePeak]:
        """The peak of every pipeline rank, in order."""


def stage_memory(plan: Plan, stage: int, peak: StagePeak) -> StageMemory:
    """The peak of a rank with what the device holds outside the allocator."""
    peak_bytes = sum(peak.terms.values())
    on_gpu = plan.chip.architecture != "cpu"
    num_groups = sum(plan.layout.degree(axis) > 1 for axis in ("tp", "cp", "dp", "pp", "ep", "edp", "etp"))
    if plan.shards_dynamically:
        num_groups += num_dynamic_groups(plan.layout.cp, plan.layout.tp)
    reserve = {
        "attention_in_graphs": peak.graph_pool_bytes,
        "slack": ALLOCATOR_SLACK * peak_bytes,
        "context": CONTEXT_BYTES if on_gpu else 0.0,
        "communication": num_groups * COMMUNICATOR_BYTES * 2 if on_gpu else 0.0,
    }
    return StageMemory(stage, peak_bytes, peak.terms, peak.moment, peak_bytes + sum(reserve.values()), reserve)


def layer_kinds(plan: Plan) -> set[Layer]:
    """The distinct layers of the model; equal layers save equal activations."""
    return {layer for chunk in plan.chunks for layer in chunk_layers(plan, chunk)}


def in_flight(plan: Plan, stage: int) -> list[int]:
    """Microbatches whose activations each chunk of a rank holds when the rank holds most, in order of chunks."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    # EP overlap runs a forward together with the backward that would have freed its memory.
    one_more = 1 if plan.knobs.ep_overlap and layout.pp > 1 else 0
    if layout.pp == 1:
        return [1]
    if layout.pipeline_schedule == "interleaved":
        num_warmup = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1 + one_more
        rounds, rest = divmod(num_warmup, layout.chunks)  # chunks take turns, PP microbatches at a time
        held = (rounds * layout.pp + min(max(rest - c * layout.pp, 0), layout.pp) for c in range(layout.vpp))
        return [min(count, each) for each in held]
    if layout.pipeline_schedule == "dualpipev":
        return [min(count, 2 * layout.pp - stage), min(count, stage + 1)]
    num_chunks = max(1, layout.vpp)
    return [min(count, layout.pp - stage + (layout.pp if layout.schedule == "zero-bubble" else 0) // 2)] * num_chunks


def fraction_on_device(plan: Plan, contents: StageContents) -> float:
    """The fraction of a rank's activations that is left on the device when whole layers are offloaded."""
    num_offloaded = plan.knobs.activation_offload_layers
    if not num_offloaded or not contents.layers:
        return 1.0
    return max(0.0, 1 - num_offloaded / len(contents.layers))


def add_terms(parts: Iterable[Terms]) -> Terms:
    """The sum of several tables of bytes, term by term."""
    sums: Terms = {}
    for part in parts:
        for name, size in part.items():
            sums[name] = sums.get(name, 0.0) + size
    return sums
