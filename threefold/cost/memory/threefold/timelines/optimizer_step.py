"""The optimizer's step in our own engine: Muon's gathered matrices, and how much of AdamW's states is on the host.

It follows `engine/optim/muon.py`, `engine/data_parallel/full_matrices.py` and `engine/optim/cpu_offload.py`.
"""

from collections.abc import Sequence

from threefold.cost.local_parameters import LocalParameter, fill_buckets, stage_parameters, trained_parameters
from threefold.cost.memory.threefold.local_sizes import FP32
from threefold.cost.memory.threefold.timelines.timeline import Timeline
from threefold.cost.stage_contents import StageContents, stage_contents
from threefold.plan.plan import Plan

ORTHOGONALIZED_ELEMENTS = 2**26  # elements of the matrices that Muon orthogonalizes together


def rank_parameters(plan: Plan, contents: StageContents) -> Sequence[LocalParameter]:
    """The parameters of the first rank of a stage."""
    vocab_rows = -(-plan.model.vocab // plan.layout.tp)
    return stage_parameters(plan, vocab_rows)[stage_contents(plan).index(contents)]


def owned_parts(bucket: Sequence[LocalParameter]) -> list[float]:
    """Elements that the first rank owns of each parameter of a bucket: its equal part is a run of them."""
    left, parts = sum(one.elements for one in bucket) / bucket[0].num_copies, []
    for parameter in bucket:
        part = min(left, parameter.elements)
        if part <= 0:
            break
        parts.append(part)
        left -= part
    return parts


def _buckets_in_order(parameters: Sequence[LocalParameter]) -> list[list[LocalParameter]]:
    """Buckets in the order in which their gradients are complete; those that other pipeline ranks share come last."""
    completes = {one.name: number for number, one in enumerate(reversed(parameters))}
    buckets = [bucket for _, _, bucket in fill_buckets(parameters)]
    return sorted(buckets, key=lambda bucket: (bucket[0].is_shared, completes[bucket[-1].name]))


def muon_peak(plan: Plan, contents: StageContents, accumulates_wider: bool) -> float:
    """The most bytes in a step of Muon. All its tensors are in fp32. Gradients that are accumulated in another dtype
    than weights have lie in buckets, also on one rank."""
    parameters = trained_parameters(rank_parameters(plan, contents))
    is_sharded = plan.knobs.data_parallel != "zero1" and plan.layout.gpus > 1
    groups = [[one] for one in parameters] if is_sharded else _buckets_in_order(parameters)
    line, last = Timeline(), 0.0
    for group in groups:
        is_gathered = group[0].num_copies > 1 or (not is_sharded and accumulates_wider)
        gathered = sum(one.elements * (_padding(one, plan.layout.replicate) if is_sharded else 1) for one in group)
        last = _update_bucket(line, group, last, gathered if is_gathered else 0.0, keeps_updates=not is_sharded)
    return FP32 * line.peak


def _padding(parameter: LocalParameter, replicate: int) -> float:
    """What FSDP gathers of a stack of experts, over the stack: shards are of whole experts, and equal."""
    if not parameter.is_expert or len(parameter.shape) < 3:
        return 1.0
    shards, rows = max(1, parameter.num_copies // replicate), parameter.num_matrices
    return -(-rows // shards) * shards / rows


def _update_bucket(
    line: Timeline, bucket: Sequence[LocalParameter], last: float, gathered: float, keeps_updates: bool
) -> float:
    """Elements while a bucket's matrices are updated: the updates of what the rank owns, as it gathers them, all that
    it gathers (`gathered`, if it does), then one matrix after the other. `last` is the matrix before, which is there
    until the next one is; the last one of this bucket is returned."""
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
    for matrix in matrices:
        whole = matrix.elements * matrix.num_shards
        if matrix.num_shards > 1:  # each rank's shard, all of them, and the matrix
            line.make(matrix.elements, whole, whole)
            line.free(matrix.elements, whole)
        line.free(last)
        line.pass_through(_orthogonalized(matrix, whole))
        last = whole if matrix.num_shards > 1 else 0.0
    line.free(owned if keeps_updates else 0.0)
    if last:
        line.free(gathered)
        return last
    return gathered


def _orthogonalized(parameter: LocalParameter, whole: float) -> float:
    """The matrices as Newton-Schulz steps change them: four times their size, and some squares of the shorter side. A
    stack has its results beside it, and goes through some matrices at a time."""
    short, long = sorted(parameter.shape[-2:])
    per_element = 4 + short / long
    if not parameter.is_expert:
        return per_element * whole
    matrix = short * long
    at_once = min(parameter.num_matrices, max(1, ORTHOGONALIZED_ELEMENTS // matrix))
    return whole + per_element * at_once * matrix


def device_fraction(plan: Plan, contents: StageContents) -> float:
    """The fraction of AdamW's states that stays on the device: whole tensors go to the host, the largest first, until
    the part that was asked for is reached as nearly as possible."""
    wanted = plan.knobs.optimizer_offload
    if wanted in (0.0, 1.0):
        return 1 - wanted
    parameters = trained_parameters(rank_parameters(plan, contents))
    if plan.knobs.data_parallel == "zero1" and plan.layout.gpus > 1:
        sizes = [part for _, _, bucket in fill_buckets(parameters) for part in owned_parts(bucket)]
    else:
        sizes = [one.elements / max(1, one.num_copies // plan.layout.replicate) for one in parameters]
    left, total = wanted * sum(sizes), sum(sizes)
    for size in sorted(sizes, reverse=True):
        if left > size / 2:
            left -= size
    return (1 - wanted) + left / total if total else 1 - wanted
