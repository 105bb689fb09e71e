"""The optimizer's step in our own engine: Muon's gathered matrices, and how much of AdamW's states is on the host.

It follows `engine/optim/muon.py`, `engine/data_parallel/full_matrices.py` and `engine/optim/cpu_offload.py`.

Mirrors `engine/optim/muon.py`, `engine/data_parallel/full_matrices.py`, `engine/optim/cpu_offload.py`.
"""

import math
from collections.abc import Sequence

from threefold.cost.format_support import STATE_BYTES, master_weight_bytes, muon_format
from threefold.cost.local_parameters import (
    LocalParameter,
    fill_buckets,
    first_vocab_rows,
    owned_parts,
    stage_parameters,
    trained_parameters,
    updated_sizes,
)
from threefold.cost.memory.threefold.local_sizes import FP32
from threefold.cost.memory.threefold.timelines.timeline import Timeline
from threefold.cost.stage_contents import StageContents, stage_contents
from threefold.plan.plan import Plan

ORTHOGONALIZED_ELEMENTS = 2**26  # elements of the matrices that Muon orthogonalizes together
# Optimizer states on the host pass through the device in chunks: how many at a time, chunks of a whole step, and the
# least and most elements of a chunk.
NUM_SLOTS, CHUNKS_PER_STEP, MIN_CHUNK, MAX_CHUNK = 8, 128, 2**21, 2**24


def rank_parameters(plan: Plan, contents: StageContents) -> Sequence[LocalParameter]:
    """The parameters of the first rank of a stage."""
    return stage_parameters(plan, first_vocab_rows(plan))[stage_contents(plan).index(contents)]


def _buckets_in_order(parameters: Sequence[LocalParameter]) -> list[list[LocalParameter]]:
    """Buckets in the order in which their gradients are complete; those that other pipeline ranks share come last."""
    completes = {one.name: number for number, one in enumerate(reversed(parameters))}
    buckets = [bucket for _, _, bucket in fill_buckets(parameters)]
    return sorted(buckets, key=lambda bucket: (bucket[0].is_shared, completes[bucket[-1].name]))


def muon_peak(plan: Plan, contents: StageContents, accumulates_wider: bool) -> float:
    """The most bytes in a step of Muon. Its tensors are in fp32, but for those of GEMMs in bf16. Gradients that are
    accumulated in another dtype than weights have lie in buckets, also on one rank."""
    parameters = trained_parameters(rank_parameters(plan, contents))
    layout = plan.layout
    is_sharded = plan.knobs.data_parallel != "zero1" and max(layout.dp * layout.cp, layout.edp) > layout.replicate
    groups = [[one] for one in parameters] if is_sharded else _buckets_in_order(parameters)
    line, last, size = Timeline(), (0.0, 0.0), STATE_BYTES[muon_format(plan)] / FP32
    for group in groups:
        is_gathered = group[0].num_copies > 1 or (not is_sharded and accumulates_wider)
        gathered = sum(one.elements * (_padding(one, plan.layout.replicate) if is_sharded else 1) for one in group)
        gathered = gathered if is_gathered else 0.0
        last = _update_bucket(line, group, last, gathered, size, keeps_updates=not is_sharded)
    return FP32 * line.peak


def _padding(parameter: LocalParameter, replicate: int) -> float:
    """What FSDP gathers of a stack of experts, over the stack: shards are of whole experts, and equal."""
    if not parameter.is_expert or len(parameter.shape) < 3:
        return 1.0
    shards, rows = max(1, parameter.num_copies // replicate), parameter.num_matrices
    return -(-rows // shards) * shards / rows


def _update_bucket(
    line: Timeline,
    bucket: Sequence[LocalParameter],
    last: tuple[float, float],
    gathered: float,
    size: float,
    keeps_updates: bool,
) -> tuple[float, float]:
    """Elements while a bucket's matrices are updated: the updates of what the rank owns, as it gathers them, all that
    it gathers (`gathered`, if it does), then one matrix after the other. `last` are the matrix before, which is there
    until the next one is, and the results of a stack before, which are there until the next ones are; those of this
    bucket are returned."""
    if not any(parameter.uses_muon for parameter in bucket):
        return last
    parts = owned_parts(bucket)
    # A rank orthogonalizes the matrices of which it owns a part.
    matrices = [parameter for parameter, _ in zip(bucket, parts, strict=False) if parameter.uses_muon]
    owned = sum(part for parameter, part in zip(bucket, parts, strict=False) if parameter.uses_muon)
    line.make(owned)
    line.pass_through(2 * max(part for part in parts))  # a gradient in fp32, and scaled
    line.make(sum(parts) if gathered else 0.0, gathered)
    line.free(sum(parts) if gathered else 0.0, 0.0 if keeps_updates else owned)
    before, results_before = last
    for matrix in matrices:
        whole = matrix.elements * matrix.num_shards
        if matrix.num_shards > 1:  # each rank's shard, all of them, and the matrix
            line.make(matrix.elements, whole, whole)
            line.free(matrix.elements, whole)
        line.free(before)
        results = size * whole if matrix.is_expert else 0.0
        line.make(results)
        line.free(results_before)
        line.pass_through(_orthogonalized(matrix, whole, size))
        before, results_before = whole if matrix.num_shards > 1 else 0.0, results
    line.free(owned if keeps_updates else 0.0)
    if not gathered:  # then the next bucket's updates are made when these results are applied
        line.free(results_before)
        return before, 0.0
    if before:
        line.free(gathered)
        return before, results_before
    return gathered, results_before


def _orthogonalized(parameter: LocalParameter, whole: float, size: float) -> float:
    """The matrices as Newton-Schulz steps change them: twice, and a square of the shorter side. They are scaled in fp32
    before they become elements of `size`. A stack goes through some matrices at a time."""
    short, long = sorted(parameter.shape[-2:])
    per_element = max(size * (2 + short / long), 1 + size if size < 1 else 1.0)
    if not parameter.is_expert:
        return per_element * whole
    matrix = short * long
    at_once = min(parameter.num_matrices, max(1, ORTHOGONALIZED_ELEMENTS // matrix))
    return per_element * at_once * matrix


def device_fraction(plan: Plan, contents: StageContents) -> float:
    """The fraction of AdamW's states that stays on the device: whole tensors go to the host, the largest first, until
    the part that was asked for is reached as nearly as possible."""
    wanted = plan.knobs.optimizer_offload
    if wanted in (0.0, 1.0):
        return 1 - wanted
    sizes = updated_sizes(plan)[stage_contents(plan).index(contents)]
    return 1 - sum(_offloaded_sizes(sizes, wanted)) / sum(sizes) if sizes else 1 - wanted


def host_slot_bytes(plan: Plan, contents: StageContents) -> float:
    """Device memory through which chunks of the states on the host pass in the optimizer's step."""
    if not plan.knobs.optimizer_offload or plan.chip.architecture == "cpu":
        return 0.0
    sizes = _offloaded_sizes(updated_sizes(plan)[stage_contents(plan).index(contents)], plan.knobs.optimizer_offload)
    if not sizes:
        return 0.0
    is_own_master = plan.knobs.data_parallel != "zero1" and plan.layout.gpus > 1
    per_element = 2 * STATE_BYTES[plan.knobs.optimizer_dtype] + (0 if is_own_master else master_weight_bytes(plan))
    chunk = min(MAX_CHUNK, max(MIN_CHUNK, sum(sizes) / CHUNKS_PER_STEP))
    num_chunks = sum(math.ceil(size / chunk) for size in sizes)
    return min(NUM_SLOTS, num_chunks) * min(chunk, max(sizes)) * per_element


def _offloaded_sizes(sizes: Sequence[float], fraction: float) -> list[float]:
    """Those of the tensors whose states are on the host."""
    left, chosen = fraction * sum(sizes), []
    for size in sorted(sizes, reverse=True):
        if left > size / 2:
            left -= size
            chosen.append(size)
    return chosen
