"""How many microbatches, and which pipeline ranks, show what all of them would."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from torch.distributed.pipelining.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD

from threefold.engine.pipeline.order import Order, order
from threefold.engine.shard.order import chunks_of
from threefold.findings import FindingsError
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan

_orders = cache(order)
_CHANGES = {FORWARD: (1, 0), FULL_BACKWARD: (-1, 0), BACKWARD_INPUT: (-1, 1), BACKWARD_WEIGHT: (0, -1)}


def fewer_microbatches(plan: Plan, stage: int) -> Plan:
    """The plan with as few as reach the peak."""
    wanted = _needed(plan, stage)
    job = replace(plan.job, global_batch=wanted * plan.layout.dp * plan.job.micro_batch)
    return replace(plan, job=job)


def _needed(plan: Plan, stage: int) -> int:
    count, layout, knobs = plan.num_microbatches, plan.layout, plan.knobs
    # In buffers gradients are there from the start; else the first backward leaves them to all that follow.
    same_dtype = knobs.precision == "fp32" or (knobs.grad_dtype == "bf16" and knobs.precision != "fp16")
    buffered = layout.gpus > 1 and knobs.data_parallel == "zero1" and not same_dtype
    if layout.pp == 1:
        return min(count, (1 if buffered else 2) + knobs.ep_overlap)  # merged passes are of two
    fullest = _fullest(plan, stage, count, buffered)
    for tried in range(1 if layout.vpp == 1 else layout.pp, count, 1 if layout.vpp == 1 else layout.pp):
        try:
            if _fullest(plan, stage, tried, buffered) == fullest:
                # Merged, one round more: what is beside each other differs from turn to turn.
                return min(count, tried + layout.pp * knobs.ep_overlap)
        except FindingsError:  # a schedule that cannot order so few
            continue
    return count


def _fullest(plan: Plan, stage: int, count: int, buffered: bool = True) -> tuple[int, tuple[int, ...], int]:
    """The most layers of microbatches that a rank holds, of how many microbatches each chunk's are then, and the most
    with those whose weights wait for their gradients."""
    layout = plan.layout
    mine = chunks_of(plan, stage)
    weights = {number: _weight(plan.chunks[number]) for number in mine}
    held, behind = dict.fromkeys(mine, 0), set(mine if buffered else ())
    most: tuple[int, tuple[int, ...]] = (0, ())
    actions: Order = _orders(layout.pipeline_schedule, layout.pp, layout.vpp, count)
    waiting, most_with_waiting = 0, 0
    for change, chunk, waits in _passes(actions[stage]):
        held[chunk] += change
        waiting += waits * weights[chunk]
        if waits < 0 or (change < 0 and not waits):  # the gradients of its weights are there
            behind.add(chunk)
        if len(behind) == len(mine):
            layers = sum(weights[n] * held[n] for n in mine)
            most = max(most, (layers, tuple(held.values())))
            most_with_waiting = max(most_with_waiting, layers + waiting)
    return *most, most_with_waiting


def _weight(chunk: Chunk) -> int:
    return len(chunk.layers) + chunk.mtp + chunk.loss


def _passes(actions: Iterable[Any]) -> Iterable[tuple[int, int, int]]:
    """+1 for a forward and -1 for a backward through a chunk, of merged ones both; +1 and -1 for weights that wait."""
    for action in actions:
        if action is None:
            continue
        for part in getattr(action, "sub_actions", None) or (action,):
            change, waits = _CHANGES.get(part.computation_type, (0, 0))
            if change or waits:
                yield change, part.stage_index, waits


def distinct_stages(plan: Plan) -> dict[int, list[int]]:
    """Pipeline ranks that hold alike chunks and as much of them, by the first of each kind."""
    found: dict[object, list[int]] = {}
    for stage in range(plan.layout.pp):
        chunks = [plan.chunks[number] for number in chunks_of(plan, stage)]
        layers = plan.model.layers
        holds = tuple((tuple(layers[i] for i in c.layers), c.embedding, c.mtp, c.loss) for c in chunks)
        runs = _fullest(plan, stage, plan.num_microbatches) if plan.layout.pp > 1 else None
        found.setdefault((holds, runs), []).append(stage)
    return {stages[0]: stages for stages in found.values()}
