"""The moments of a pipeline schedule at which a rank of our own engine may hold most: microbatches in flight by chunk.

`peak.py` looks at every moment of `schedule_moments(plan, stage, ...)`. On rank 0 of PP 2 under 1F1B the first one is
`ScheduleMoment(in_flight=(2,), forward_chunk=0, backward_chunk=0, finished=(0,), pending_wgrad=(0,))`.
EP overlap runs the forward of one microbatch together with the backward of another: `overlap_peak.py` looks at every
pair of `stage_overlap_pairs(plan, stage)`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from threefold.cost.memory.threefold.delayed_wgrad import splits_backward, splits_some_backwards
from threefold.plan.plan import Plan

NO_CHUNK = -1


@dataclass(frozen=True)
class ScheduleMoment:
    """The state of one pipeline rank between two passes of its schedule.

    A chunk of None stands for any chunk, where the schedule is not followed pass by pass; `NO_CHUNK` stands for no
    pass.
    """

    in_flight: tuple[int, ...]  # microbatches whose forward is done and whose backward is not, by chunk
    forward_chunk: int | None  # the chunk whose forward has just ended
    backward_chunk: int | None  # the chunk whose backward is about to start
    finished: tuple[int, ...]  # microbatches whose backward is over, by chunk
    pending_wgrad: tuple[int, ...]  # finished microbatches whose weight gradients are delayed, by chunk
    wgrad_chunk: int = NO_CHUNK  # the chunk whose delayed weight gradients run now
    is_split: bool = False  # whether the backward delays weight gradients, in a schedule that does so for some only

    @cached_property
    def passes(self) -> list[tuple[int, str]]:
        """The chunks at work, each with the pass through it: "forward", "backward" or "wgrad"."""
        passes = (("forward", self.forward_chunk), ("backward", self.backward_chunk), ("wgrad", self.wgrad_chunk))
        every = range(len(self.in_flight))
        return [
            (number, name)
            for name, chunk in passes
            for number in (every if chunk is None else (chunk,))
            if number != NO_CHUNK
        ]


def schedule_moments(plan: Plan, stage: int, most_in_flight: Sequence[int]) -> tuple[ScheduleMoment, ...]:
    """The moments to look at. `most_in_flight` stands for schedules that are not followed pass by pass (DualPipeV)."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    zero_bubble = layout.pipeline_schedule == "zero-bubble"
    if layout.pp == 1 or zero_bubble or layout.pipeline_schedule in ("1f1b", "interleaved"):
        return _followed(layout.pp, layout.vpp, stage, count, zero_bubble, splits_backward(plan))
    num_chunks = len(most_in_flight)
    finished = (max(0, count - max(most_in_flight)),) * num_chunks
    most = ScheduleMoment(tuple(most_in_flight), None, None, finished, (0,) * num_chunks)
    return (most, *_split_moments(layout.pp, stage, count)) if splits_some_backwards(plan) else (most,)


def _split_moments(pp: int, stage: int, count: int) -> Iterator[ScheduleMoment]:
    """Backwards of DualPipeV whose weight gradients are delayed: of the second chunk before forwards and backwards come
    in pairs, and of both chunks at the end of a step."""
    if stage < pp - 1:
        filled = min(count, 2 * pp - stage - 1), min(count, stage + 1)
        yield ScheduleMoment(filled, NO_CHUNK, 1, (0, 0), (0, 0), is_split=True)
    pending = stage // 2, (stage + 1) // 2
    yield ScheduleMoment((1, 0), NO_CHUNK, 0, (count - 1, count), pending, is_split=True)
    if stage:
        yield ScheduleMoment((1, 1), NO_CHUNK, 1, (count - 1, count - 1), (stage // 2, stage // 2), is_split=True)


def forward_chunk_order(pp: int, vpp: int, count: int) -> tuple[int, list[int]]:
    """Microbatches that go through a chunk before the next chunk's turn, and the chunk of every forward, in order."""
    size = count // max(1, count // pp)
    return size, [number % (size * vpp) // size for number in range(count * vpp)]


@lru_cache(maxsize=4096)
def _followed(pp: int, vpp: int, stage: int, count: int, zero_bubble: bool, split: bool) -> tuple[ScheduleMoment, ...]:
    """From the last forward before any backward until every chunk has had backwards, and as many weight gradients are
    pending as ever will be."""
    size, forwards = forward_chunk_order(pp, vpp, count)
    distance = 1 if zero_bubble else 2
    num_warmup = distance * (pp - stage - 1) + (vpp - 1) * size + 1 if vpp > 1 else pp - stage
    num_warmup = min(len(forwards), num_warmup)
    in_flight = [forwards[:num_warmup].count(chunk) for chunk in range(vpp)]
    finished, pending = [0] * vpp, [0] * vpp
    moments = []
    forward = forwards[num_warmup - 1]
    # Without virtual stages the second backward is like all that follow; zero-bubble fills the pipeline more slowly.
    num_backwards = (2 * size * vpp if vpp > 1 else pp + 1 if zero_bubble else 2) + (stage + 1 if split else 0)
    for number in range(min(len(forwards), num_backwards)):
        backward = vpp - 1 - forwards[number]
        moments.append(ScheduleMoment(tuple(in_flight), forward, backward, tuple(finished), tuple(pending)))
        finished[backward] += 1
        in_flight[backward] -= 1
        if split:
            pending[backward] += 1
            if number >= stage:
                wgrad = vpp - 1 - forwards[number - stage]
                moments.append(_wgrad_moment(in_flight, finished, pending, wgrad))
                pending[wgrad] -= 1
        if num_warmup + number < len(forwards):
            forward = forwards[num_warmup + number]
            in_flight[forward] += 1
        else:
            forward = NO_CHUNK
    if any(pending) and sum(finished) == len(forwards):
        wgrad = vpp - 1 - forwards[len(forwards) - sum(pending)]
        moments.append(_wgrad_moment(in_flight, finished, pending, wgrad))
    return tuple(moments)


def _wgrad_moment(
    in_flight: Sequence[int], finished: Sequence[int], pending: Sequence[int], chunk: int
) -> ScheduleMoment:
    """The start of a pass of delayed weight gradients."""
    return ScheduleMoment(tuple(in_flight), NO_CHUNK, NO_CHUNK, tuple(finished), tuple(pending), chunk)


@dataclass(frozen=True, slots=True)
class OverlapPair:
    """One forward and one backward that run together."""

    in_flight: tuple[int, ...]  # microbatches that each chunk of the rank holds before the pair
    forward_chunk: int | None  # the chunk of the forward; None where the backward runs alone
    backward_chunk: int  # the chunk of the backward


@lru_cache(maxsize=4096)
def overlap_pairs(schedule: str, pp: int, vpp: int, stage: int, count: int) -> tuple[OverlapPair, ...]:
    """The distinct pairs of a rank in a step of `count` microbatches. Without a pipeline each forward runs with the
    backward of the microbatch before it."""
    if pp == 1:
        return (OverlapPair((1,), 0 if count > 1 else None, 0),)
    if schedule == "dualpipev":
        down, up = min(count, 2 * pp - stage - 1), min(count, stage + 1)
        most_down = min(count, down + 1)
        second = OverlapPair((most_down, up - 1), 1, 0)
        backward_alone = OverlapPair((most_down, up), None, 1)
        # At the tip of the V the first two passes come one after the other.
        return (OverlapPair((down, up), 0, 1), second, *((backward_alone,) if stage == pp - 1 else ()))
    size, forwards = forward_chunk_order(pp, vpp, count)
    num_warmup = min(len(forwards), 2 * (pp - stage - 1) + (vpp - 1) * size + 1)
    in_flight = [forwards[:num_warmup].count(chunk) for chunk in range(vpp)]
    found: dict[OverlapPair, None] = {}
    for forward, number in zip(forwards[num_warmup : num_warmup + 2 * size * vpp], forwards, strict=False):
        pair = OverlapPair(tuple(in_flight), forward, vpp - 1 - number)
        found[pair] = None
        in_flight[forward] += 1
        in_flight[pair.backward_chunk] -= 1
    return tuple(found)


def stage_overlap_pairs(plan: Plan, stage: int) -> tuple[OverlapPair, ...]:
    """The pairs of a rank of a plan."""
    layout = plan.layout
    return overlap_pairs(layout.pipeline_schedule, layout.pp, layout.vpp, stage, max(1, plan.num_microbatches))
