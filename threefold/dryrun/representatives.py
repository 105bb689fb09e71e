"""Which microbatches and which pipeline stages are enough to rehearse, because the others repeat them.

`rehearse_plan` rehearses one rank for each stage that `distinct_stages` returns. `rehearse_rank` and
`measured.real_rank` run the plan that `reduce_microbatches` returns: it has just enough microbatches to reach the same
peak memory as a whole step. For example, 1F1B on the first of four stages has four microbatches in flight, however many
a step has.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from torch.distributed.pipelining.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD

from threefold.engine.schedule.pipeline_order import PipelineActions, pipeline_actions
from threefold.engine.shard.order import chunks_on_rank
from threefold.findings import FindingsError
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan

_schedule_actions = cache(pipeline_actions)
# Action -> (change of the microbatches in flight, change of the microbatches whose weight gradient is delayed).
_CHANGES = {FORWARD: (1, 0), FULL_BACKWARD: (-1, 0), BACKWARD_INPUT: (-1, 1), BACKWARD_WEIGHT: (0, -1)}


def reduce_microbatches(plan: Plan, stage: int | None) -> Plan:
    """The plan with the fewest microbatches that reach the peak memory of a whole step on this stage.

    Without a stage they are as many on all stages: enough for each, and for a pipeline to get past its warm-up.
    """
    if stage is not None:
        num_microbatches = _num_microbatches_to_peak(plan, stage)
    else:
        to_peak = [_num_microbatches_to_peak(plan, each) for each in range(plan.layout.pp)]
        num_microbatches = min(plan.num_microbatches, max(2 * plan.layout.pp, *to_peak))
    job = replace(plan.job, global_batch=num_microbatches * plan.layout.dp * plan.job.micro_batch)
    return replace(plan, job=job)


def _num_microbatches_to_peak(plan: Plan, stage: int) -> int:
    count, layout, knobs = plan.num_microbatches, plan.layout, plan.knobs
    # Gradient buffers exist from the start. Without them gradients appear in the first backward, and only the
    # microbatches after it have them beside their activations.
    same_dtype = knobs.precision == "fp32" or (knobs.grad_dtype == "bf16" and knobs.precision != "fp16")
    has_grad_buffers = layout.gpus > 1 and knobs.data_parallel == "zero1" and not same_dtype
    if layout.pp == 1:
        # With ep_overlap a pass runs two microbatches.
        return min(count, (1 if has_grad_buffers else 2) + knobs.ep_overlap)
    peak = _peak_load(plan, stage, count, has_grad_buffers)
    for tried in range(1 if layout.vpp == 1 else layout.pp, count, 1 if layout.vpp == 1 else layout.pp):
        try:
            if _peak_load(plan, stage, tried, has_grad_buffers) == peak:
                # With ep_overlap one more round is run, because the overlap pairs differ from round to round.
                return min(count, tried + layout.pp * knobs.ep_overlap)
        except FindingsError:  # the schedule needs more microbatches
            continue
    return count


def _peak_load(
    plan: Plan, stage: int, num_microbatches: int, has_grad_buffers: bool = True
) -> tuple[int, tuple[int, ...], int, int]:
    """How much a pipeline rank holds when it holds most.

    Returns the highest number of layers, summed over the microbatches in flight; the microbatches in flight of each
    chunk at that moment; with virtual stages the tensors that were sent and are not yet freed then; and the highest
    number of layers if those with a delayed weight gradient count too.
    """
    layout = plan.layout
    chunks = chunks_on_rank(plan, stage)
    num_layers = {number: _num_layers(plan.chunks[number]) for number in chunks}
    sent: Counter[tuple[int, int]] = Counter()  # hidden states and gradients, by the two chunks
    in_flight, with_gradients = dict.fromkeys(chunks, 0), set(chunks if has_grad_buffers else ())
    most: tuple[int, tuple[int, ...], int] = (0, (), 0)
    actions: PipelineActions = _schedule_actions(layout.pipeline_schedule, layout.pp, layout.vpp, num_microbatches)
    delayed, most_with_delayed = 0, 0
    for change, chunk, delayed_change in _changes(actions[stage]):
        in_flight[chunk] += change
        if layout.vpp > 1 and change:
            sent[chunk, chunk + change] += 1
        delayed += delayed_change * num_layers[chunk]
        if delayed_change < 0 or (change < 0 and not delayed_change):  # the chunk's weights have gradients from now on
            with_gradients.add(chunk)
        if len(with_gradients) == len(chunks):
            layers = sum(num_layers[n] * in_flight[n] for n in chunks)
            most = max(most, (layers, tuple(in_flight.values()), _num_unfreed(sent, chunks, plan)))
            most_with_delayed = max(most_with_delayed, layers + delayed)
    return *most, most_with_delayed


def _num_unfreed(sent: Counter[tuple[int, int]], chunks: Iterable[int], plan: Plan) -> int:
    """Tensors that were sent to other ranks and not yet freed: at most PP between two chunks (`schedule/p2p.py`)."""
    mine, all_chunks = set(chunks), range(len(plan.chunks))
    remote = {pair: count for pair, count in sent.items() if pair[1] in all_chunks and pair[1] not in mine}
    return sum(min(plan.layout.pp, count) for count in remote.values())


def _num_layers(chunk: Chunk) -> int:
    """Layers of a chunk. An MTP depth and the loss count as one layer each."""
    return len(chunk.layers) + chunk.mtp + chunk.loss


def _changes(actions: Iterable[Any]) -> Iterable[tuple[int, int, int]]:
    """(change in flight, chunk, change of delayed weight gradients) for each pass; an overlapped pass gives two."""
    for action in actions:
        if action is None:
            continue
        for part in getattr(action, "sub_actions", None) or (action,):
            change, delayed_change = _CHANGES.get(part.computation_type, (0, 0))
            if change or delayed_change:
                yield change, part.stage_index, delayed_change


def distinct_stages(plan: Plan) -> dict[int, list[int]]:
    """Groups of stages that hold equal chunks and equally many microbatches, by the first stage of each group."""
    groups: dict[object, list[int]] = {}
    for stage in range(plan.layout.pp):
        chunks = [plan.chunks[number] for number in chunks_on_rank(plan, stage)]
        layers = plan.model.layers
        contents = tuple((tuple(layers[i] for i in c.layers), c.embedding, c.mtp, c.loss) for c in chunks)
        peak = _peak_load(plan, stage, plan.num_microbatches) if plan.layout.pp > 1 else None
        groups.setdefault((contents, peak), []).append(stage)
    return {stages[0]: stages for stages in groups.values()}
