"""What each pipeline rank computes, in which order, by schedule.

Chunk i sits where `chunk_rank` says: i mod PP, or down the ranks and back up for DualPipeV. So "zero-bubble" is ZB-H1
with one chunk a rank and its interleaved form with several, never ZB-V.
"""

from types import SimpleNamespace

from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,
)

from threefold.findings import Finding, FindingsError

Order = dict[int, list[_Action | None]]
V_SHAPED = ("dualpipev",)
_SEVERAL: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def order(schedule: str, pp: int, vpp: int, num_microbatches: int, merged: bool = False) -> Order:
    """Actions of every rank. One chunk a rank takes any number of microbatches; torch orders several.

    `merged` makes pairs of a forward and a backward one action, where the schedule does not by itself.
    """
    if vpp == 1 and schedule in ("1f1b", "zero-bubble"):
        make = _one_forward_one_backward if schedule == "1f1b" else _zero_bubble
        return {rank: make(rank, pp, num_microbatches) for rank in range(pp)}
    if schedule not in _SEVERAL or vpp == 1:
        raise ValueError(f"{schedule} with {vpp} chunks a rank")
    stages = [SimpleNamespace(num_stages=pp * vpp, group_size=pp, group_rank=0, submod=None) for _ in range(vpp)]
    try:
        made = _SEVERAL[schedule](stages, num_microbatches)  # type: ignore[arg-type]
    except ValueError as error:
        raise _no_rounds(schedule, pp, num_microbatches) from error
    if merged and schedule == "interleaved":
        return {rank: _in_pairs(actions) for rank, actions in made.pipeline_order.items()}
    return made.pipeline_order


def _in_pairs(actions: list[_Action | None]) -> list[_Action | None]:
    """One forward more before the first backward, so that no backward waits for the forward it is paired with."""
    forwards = [action for action in actions if action and action.computation_type == FORWARD]
    backwards = [action for action in actions if action and action.computation_type == FULL_BACKWARD]
    kinds = [action.computation_type for action in actions if action]
    ahead = min(kinds.index(FULL_BACKWARD), len(forwards))  # the last of them is the first of a pair so far
    pairs = zip(forwards[ahead:], backwards, strict=False)
    merged = [_Action(-1, OVERLAP_F_B, None, pair) for pair in pairs]
    return [*forwards[:ahead], *merged, *backwards[len(merged) :]]


def _one_forward_one_backward(rank: int, pp: int, count: int) -> list[_Action | None]:
    ahead = min(count, pp - 1 - rank)
    actions = [_Action(rank, FORWARD, n) for n in range(ahead)]
    for n in range(count):
        if ahead + n < count:
            actions.append(_Action(rank, FORWARD, ahead + n))
        actions.append(_Action(rank, FULL_BACKWARD, n))
    return [*actions]


def _zero_bubble(rank: int, pp: int, count: int) -> list[_Action | None]:
    """ZB-H1 (arXiv 2401.10241): weights wait `rank` microbatches, which evens out the memory of the stages."""
    ahead = min(count, pp - 1 - rank)
    actions = [_Action(rank, FORWARD, n) for n in range(ahead)]
    for n in range(count + rank):
        if ahead + n < count:
            actions.append(_Action(rank, FORWARD, ahead + n))
        if n < count:
            actions.append(_Action(rank, BACKWARD_INPUT, n))
        if n >= rank:
            actions.append(_Action(rank, BACKWARD_WEIGHT, n - rank))
    return [*actions]


def split_backwards(actions: list[_Action | None], chunk: int) -> set[int]:
    """Microbatches whose backward through a chunk comes in two parts, input then weights."""
    parts = [a for a in actions if a and a.stage_index == chunk and a.computation_type == BACKWARD_INPUT]
    return {a.microbatch_index for a in parts if a.microbatch_index is not None}


def _no_rounds(schedule: str, pp: int, count: int) -> FindingsError:
    need = f"at least {2 * pp}" if schedule in V_SHAPED else f"equal rounds of at least PP {pp}"
    finding = Finding(
        rule="interleaved-fills-pipeline",
        at="job.global_batch",
        problem=f"{schedule} cannot order {count} microbatches on PP {pp}: it needs {need}",
        advice=f"a batch that gives a multiple of {2 * pp if schedule in V_SHAPED else pp} microbatches",
    )
    return FindingsError([finding])
