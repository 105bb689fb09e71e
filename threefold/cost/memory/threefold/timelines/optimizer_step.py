"""The optimizer's step in our own engine: Muon's gathered matrices, and how much of AdamW's states is on the host.

It follows `engine/optim/muon.py`, `engine/data_parallel/full_matrices.py` and `engine/optim/cpu_offload.py`.
"""

from collections.abc import Sequence

from threefold.cost.memory.threefold.local_sizes import FP32
from threefold.cost.memory.threefold.timelines.rank_tensors import RankTensor, buckets, owned_parts, rank_tensors
from threefold.cost.memory.threefold.timelines.timeline import Timeline
from threefold.cost.stage_contents import StageContents
from threefold.plan.plan import Plan

ORTHOGONALIZED_ELEMENTS = 2**26  # elements of the matrices that Muon orthogonalizes together


def muon_peak(plan: Plan, contents: StageContents, accumulates_wider: bool) -> float:
    """The most bytes in a step of Muon. All its tensors are in fp32. Gradients that are accumulated in another dtype
    than weights have lie in buckets, also on one rank."""
    tensors = rank_tensors(plan, contents)
    is_sharded = plan.knobs.data_parallel != "zero1" and plan.layout.gpus > 1
    groups = [[tensor] for tensor in tensors] if is_sharded else buckets(tensors)
    line, last = Timeline(), 0.0
    for group in groups:
        is_gathered = group[0].copies > 1 or (not is_sharded and accumulates_wider)
        last = _update_bucket(line, group, last, is_gathered, keeps_updates=not is_sharded)
    return FP32 * line.peak


def _update_bucket(
    line: Timeline, bucket: Sequence[RankTensor], last: float, is_gathered: bool, keeps_updates: bool
) -> float:
    """Elements while a bucket's matrices are updated: the updates of what the rank owns, as it gathers them, all that
    it gathers, then one matrix after the other. `last` is the matrix before, which is there until the next one is; the
    last one of this bucket is returned."""
    matrices = [tensor for tensor in bucket if not tensor.is_table]
    if not matrices:
        return last
    parts = owned_parts(bucket)
    owned = sum(part for tensor, part in zip(bucket, parts, strict=False) if not tensor.is_table)
    line.make(owned)
    line.pass_through(2 * max(part for part in parts))  # a gradient in fp32, and scaled
    gathered = sum(tensor.elements for tensor in bucket) if is_gathered else 0.0
    line.make(sum(parts) if is_gathered else 0.0, gathered)
    line.free(sum(parts) if is_gathered else 0.0, 0.0 if keeps_updates else owned)
    for tensor in matrices:
        whole = tensor.rows * tensor.columns * tensor.count
        if tensor.shards > 1:  # each rank's shard, all of them, and the matrix
            line.make(tensor.elements, whole, whole)
            line.free(tensor.elements, whole)
        line.free(last)
        line.pass_through(_orthogonalized(tensor, whole))
        last = whole if tensor.shards > 1 else 0.0
    line.free(owned if keeps_updates else 0.0)
    if last:
        line.free(gathered)
        return last
    return gathered


def _orthogonalized(tensor: RankTensor, whole: float) -> float:
    """The matrices as Newton-Schulz steps change them: four times their size, and some squares of the shorter side. A
    stack has its results beside it, and goes through some matrices at a time."""
    short, long = sorted((tensor.rows, tensor.columns))
    per_element = 4 + short / long
    if tensor.count == 1 and not tensor.is_expert:
        return per_element * whole
    matrix = tensor.rows * tensor.columns
    at_once = min(tensor.count, max(1.0, ORTHOGONALIZED_ELEMENTS // matrix))
    return whole + per_element * at_once * matrix


def device_fraction(plan: Plan, contents: StageContents) -> float:
    """The fraction of AdamW's states that stays on the device: whole tensors go to the host, the largest first, until
    the part that was asked for is reached as nearly as possible."""
    wanted = plan.knobs.optimizer_offload
    if wanted in (0.0, 1.0):
        return 1 - wanted
    tensors = rank_tensors(plan, contents)
    if plan.knobs.data_parallel == "zero1" and plan.layout.gpus > 1:
        sizes = [part for bucket in buckets(tensors) for part in owned_parts(bucket)]
    else:
        sizes = [tensor.elements / max(1, tensor.copies // plan.layout.replicate) for tensor in tensors]
    left, total = wanted * sum(sizes), sum(sizes)
    for size in sorted(sizes, reverse=True):
        if left > size / 2:
            left -= size
    return (1 - wanted) + left / total if total else 1 - wanted
