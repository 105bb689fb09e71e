"""The order of actions of each pipeline rank, for every schedule.

Chunk i is on rank i mod PP, or down the ranks and back up for DualPipeV (`chunk_rank`). So "zero-bubble" is ZB-H1 with
one chunk per rank and its interleaved form with several, never ZB-V. `pipeline.py` and the dry run ask for the actions.
Example: 1F1B on the first of two ranks with three microbatches is F0 F1 B0 F2 B1 B2.
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

PipelineActions = dict[int, list[_Action | None]]
V_SHAPED = ("dualpipev",)
_MULTI_CHUNK: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def pipeline_actions(
    schedule: str, pp: int, vpp: int, num_microbatches: int, overlap_f_b: bool = False
) -> PipelineActions:
    """The actions of every rank. With one chunk per rank any number of microbatches works; torch orders several chunks.

    `overlap_f_b` joins a forward and a backward into one action where the schedule does not do so by itself.
    """
    if vpp == 1 and schedule in ("1f1b", "zero-bubble"):
        make = _one_forward_one_backward if schedule == "1f1b" else _zero_bubble
        return {rank: make(rank, pp, num_microbatches) for rank in range(pp)}
    if schedule not in _MULTI_CHUNK or vpp == 1:
        raise ValueError(f"{schedule} with {vpp} chunks a rank")
    stages = [SimpleNamespace(num_stages=pp * vpp, group_size=pp, group_rank=0, submod=None) for _ in range(vpp)]
    try:
        torch_schedule = _MULTI_CHUNK[schedule](stages, num_microbatches)  # type: ignore[arg-type]
    except ValueError as error:
        raise _microbatch_count_error(schedule, pp, num_microbatches) from error
    if overlap_f_b and schedule == "interleaved":
        return {rank: _pair_forward_backward(actions) for rank, actions in torch_schedule.pipeline_order.items()}
    return torch_schedule.pipeline_order


def _pair_forward_backward(actions: list[_Action | None]) -> list[_Action | None]:
    """Join forwards and backwards into pairs, after one more forward, so that no backward needs its pair's forward."""
    forwards = [action for action in actions if action and action.computation_type == FORWARD]
    backwards = [action for action in actions if action and action.computation_type == FULL_BACKWARD]
    kinds = [action.computation_type for action in actions if action]
    ahead = min(kinds.index(FULL_BACKWARD), len(forwards))  # the last of these is paired in the order without overlap
    pairs = zip(forwards[ahead:], backwards, strict=False)
    joined = [_Action(-1, OVERLAP_F_B, None, pair) for pair in pairs]
    return [*forwards[:ahead], *joined, *backwards[len(joined) :]]


def _one_forward_one_backward(rank: int, pp: int, num_microbatches: int) -> list[_Action | None]:
    ahead = min(num_microbatches, pp - 1 - rank)
    actions = [_Action(rank, FORWARD, n) for n in range(ahead)]
    for n in range(num_microbatches):
        if ahead + n < num_microbatches:
            actions.append(_Action(rank, FORWARD, ahead + n))
        actions.append(_Action(rank, FULL_BACKWARD, n))
    return [*actions]


def _zero_bubble(rank: int, pp: int, num_microbatches: int) -> list[_Action | None]:
    """ZB-H1 (arXiv 2401.10241): wgrads are delayed by `rank` microbatches, which evens out the memory of the stages."""
    ahead = min(num_microbatches, pp - 1 - rank)
    actions = [_Action(rank, FORWARD, n) for n in range(ahead)]
    for n in range(num_microbatches + rank):
        if ahead + n < num_microbatches:
            actions.append(_Action(rank, FORWARD, ahead + n))
        if n < num_microbatches:
            actions.append(_Action(rank, BACKWARD_INPUT, n))
        if n >= rank:
            actions.append(_Action(rank, BACKWARD_WEIGHT, n - rank))
    return [*actions]


def split_backwards(actions: list[_Action | None], chunk: int) -> set[int]:
    """Microbatches whose backward through a chunk has two actions, input gradients and then weight gradients."""
    parts = [a for a in actions if a and a.stage_index == chunk and a.computation_type == BACKWARD_INPUT]
    return {a.microbatch_index for a in parts if a.microbatch_index is not None}


def _microbatch_count_error(schedule: str, pp: int, num_microbatches: int) -> FindingsError:
    need = f"at least {2 * pp}" if schedule in V_SHAPED else f"equal rounds of at least PP {pp}"
    finding = Finding(
        rule="interleaved-fills-pipeline",
        at="job.global_batch",
        problem=f"{schedule} cannot order {num_microbatches} microbatches on PP {pp}: it needs {need}",
        advice=f"a batch that gives a multiple of {2 * pp if schedule in V_SHAPED else pp} microbatches",
    )
    return FindingsError([finding])
