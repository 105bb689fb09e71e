"""The moments of a pipeline schedule at which a rank of our own engine may hold most: microbatches in flight by chunk.

`peak.py` looks at the moments of `fullest_moments(plan, stage)`. On rank 0 of PP 2 under 1F1B the first one is
`ScheduleMoment(in_flight=(2,), forward_chunk=0, backward_chunk=0, finished=(0,), pending_wgrad=(0,))`.
EP overlap runs the forward of one microbatch together with the backward of another: `overlap_peak.py` looks at every
pair of `stage_overlap_pairs(plan, stage)`.

Mirrors `engine/schedule/pipeline_order.py`, `engine/schedule/pipeline.py`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from operator import le

from threefold.cost.memory.threefold.delayed_wgrad import splits_backward, splits_some_backwards
from threefold.plan.plan import Plan

NO_CHUNK = -1


@dataclass(frozen=True)
class ScheduleMoment:
    """The state of one pipeline rank between two passes of its schedule. `NO_CHUNK` stands for no pass."""

    in_flight: tuple[int, ...]  # microbatches whose forward is done and whose backward is not, by chunk
    forward_chunk: int  # the chunk whose forward has just ended
    backward_chunk: int  # the chunk whose backward is about to start
    finished: tuple[int, ...]  # microbatches whose backward is over, by chunk
    pending_wgrad: tuple[int, ...]  # finished microbatches whose weight gradients are delayed, by chunk
    wgrad_chunk: int = NO_CHUNK  # the chunk whose delayed weight gradients run now
    is_split: bool = False  # whether weight gradients are delayed, in a schedule that does so for some only

    @cached_property
    def passes(self) -> list[tuple[int, str]]:
        """The chunks at work, each with the pass through it: "forward", "backward" or "wgrad"."""
        passes = (("forward", self.forward_chunk), ("backward", self.backward_chunk), ("wgrad", self.wgrad_chunk))
        return [(chunk, name) for name, chunk in passes if chunk != NO_CHUNK]


CountedMoment = tuple[tuple[int, ...], ScheduleMoment]


def schedule_moments(plan: Plan, stage: int) -> tuple[ScheduleMoment, ...]:
    """Every moment of a schedule."""
    return _moments(*_schedule(plan, stage))


def fullest_moments(plan: Plan, stage: int) -> tuple[tuple[CountedMoment, ...], ...]:
    """The moments that may hold most, those together that differ in numbers of microbatches alone. Each has what it
    holds by chunk: microbatches in flight, hidden states and gradients that were sent, and delayed weight gradients."""
    return _fullest(*_schedule(plan, stage))


def _schedule(plan: Plan, stage: int) -> tuple[int, int, int, int, str, bool]:
    """What the moments of a rank depend on."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    kind = layout.pipeline_schedule if layout.pp > 1 or layout.pipeline_schedule == "zero-bubble" else ""
    splits = splits_some_backwards(plan) if kind == "dualpipev" else splits_backward(plan)
    return layout.pp, layout.vpp, stage, count, kind, splits


def _moments(pp: int, vpp: int, stage: int, count: int, kind: str, splits: bool) -> tuple[ScheduleMoment, ...]:
    if kind == "dualpipev":
        return _dualpipev_moments(pp, stage, count, splits)
    return _followed(pp, vpp, stage, count, kind == "zero-bubble", splits)


@lru_cache(maxsize=4096)
def _fullest(
    pp: int, vpp: int, stage: int, count: int, kind: str, splits: bool
) -> tuple[tuple[CountedMoment, ...], ...]:
    """The moments without those that hold no more of anything than another one with the same passes, whose chunks are
    in use and finished alike. Past PP sent states of a chunk nothing more is held (`pipeline_buffers.py`)."""
    alike: dict[object, dict[tuple[int, ...], ScheduleMoment]] = {}
    most = min(pp, count)
    for one in _moments(pp, vpp, stage, count, kind, splits):
        chunks = one.forward_chunk, one.backward_chunk, one.wgrad_chunk, one.is_split
        used = [tuple(map(bool, counts)) for counts in (one.in_flight, one.finished)]
        sent = [min(most, flying + done) for flying, done in zip(one.in_flight, one.finished, strict=True)]
        counts = (*one.in_flight, *sent, *(min(most, done) for done in one.finished), *one.pending_wgrad)
        alike.setdefault((*chunks, *used), {}).setdefault(counts, one)
    return tuple(
        tuple(each for each in group.items() if not any(_is_below(each[0], others) for others in group))
        for group in alike.values()
    )


def _is_below(counts: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return counts != others and all(map(le, counts, others))


@lru_cache(maxsize=4096)
def _dualpipev_moments(pp: int, stage: int, count: int, split: bool) -> tuple[ScheduleMoment, ...]:
    """Every pass of a step of DualPipeV. `split` where its schedule may delay weight gradients."""
    in_flight, finished, pending = [0, 0], [0, 0], [0, 0]
    moments: dict[ScheduleMoment, None] = {}
    for kind, chunk in chain.from_iterable(dualpipev_order(pp, stage, count)):
        if kind == "forward":
            in_flight[chunk] += 1
            moments[_moment(in_flight, finished, pending, forward=chunk)] = None
        elif kind != "wgrad":
            is_split = split and kind == "dgrad"
            moments[_moment(in_flight, finished, pending, backward=chunk, is_split=is_split)] = None
            in_flight[chunk] -= 1
            finished[chunk] += 1
            pending[chunk] += is_split
        elif split:
            moments[_wgrad_moment(in_flight, finished, pending, chunk)] = None
            pending[chunk] -= 1
    return tuple(moments)


def dualpipev_order(pp: int, stage: int, count: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """The passes of a rank, each with its chunk: "forward", "backward", or "dgrad" with a "wgrad" that follows. A
    forward and a backward that may overlap come together. It is the order of torch's `ScheduleDualPipeV`; of many
    microbatches the middle ones, which repeat, are left out."""
    later, count = pp - stage - 1, min(count, 4 * pp)
    delayed: deque[int] = deque()
    for chunk in (*(0,) * (2 * later), *(0, 1) * (stage + 1)):
        yield (("forward", chunk),)
    for _ in range(later):
        yield from ((("dgrad", 1),), (("wgrad", 1),), (("forward", 1),))
    for number in range(max(0, count - 2 * pp + stage + 1)):
        pair = ("forward", 0), ("backward", 1)
        # At the tip of the V the first two passes come one after the other.
        yield from (pair,) if number or later else ((pair[0],), (pair[1],))
        yield ("forward", 1), ("backward", 0)
    for _ in range(later):
        yield (("backward", 1),)
        yield ("forward", 1), ("backward", 0)
    kind = "backward"
    for number in range(stage + 1):
        for chunk in (1, 0):
            # In the second half the weight gradients are delayed.
            if number == (stage + 1) // 2 and chunk == stage % 2:
                kind = "dgrad"
            yield ((kind, chunk),)
            delayed.extend([chunk] if kind == "dgrad" else [])
    for _ in range(later):
        if delayed:
            yield (("wgrad", delayed.popleft()),)
        yield ((kind, 0),)
        delayed.extend([0] if kind == "dgrad" else [])
    for chunk in delayed:
        yield (("wgrad", chunk),)


def _moment(
    in_flight: Sequence[int],
    finished: Sequence[int],
    pending: Sequence[int],
    forward: int = NO_CHUNK,
    backward: int = NO_CHUNK,
    is_split: bool = False,
) -> ScheduleMoment:
    return ScheduleMoment(tuple(in_flight), forward, backward, tuple(finished), tuple(pending), is_split=is_split)


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
    return ScheduleMoment(tuple(in_flight), NO_CHUNK, NO_CHUNK, tuple(finished), tuple(pending), chunk, is_split=True)


@dataclass(frozen=True, slots=True)
class OverlapPair:
    """One forward and one backward that run together."""

    in_flight: tuple[int, ...]  # microbatches that each chunk of the rank holds before the pair
    forward_chunk: int | None  # the chunk of the forward; None where the backward runs alone
    backward_chunk: int  # the chunk of the backward
    finished: tuple[int, ...]  # microbatches whose backward is over, by chunk; more than PP count as PP
    pending_wgrad: tuple[int, ...] = ()  # finished microbatches whose weight gradients are delayed, if there are any


@lru_cache(maxsize=4096)
def overlap_pairs(schedule: str, pp: int, vpp: int, stage: int, count: int) -> tuple[OverlapPair, ...]:
    """The distinct pairs of a rank in a step of `count` microbatches. Without a pipeline each forward runs with the
    backward of the microbatch before it, and the last backward runs alone."""
    if pp == 1:
        pairs = [OverlapPair((1,), 0, 0, (number,)) for number in range(min(2, count - 1))]
        return (*pairs, OverlapPair((1,), None, 0, (min(1, count - 1),)))
    if schedule == "dualpipev":
        return _dualpipev_pairs(pp, stage, count)
    size, forwards = forward_chunk_order(pp, vpp, count)
    num_warmup = min(len(forwards), 2 * (pp - stage - 1) + (vpp - 1) * size + 1)
    in_flight, finished = [forwards[:num_warmup].count(chunk) for chunk in range(vpp)], [0] * vpp
    found: dict[OverlapPair, None] = {}
    # Behind the last forward the backwards run alone; those of one round are enough.
    paired: list[int | None] = [*forwards[num_warmup : num_warmup + 2 * size * vpp]]
    alone = [None] * (size * vpp) if num_warmup + len(paired) == len(forwards) else []
    for forward, number in zip([*paired, *alone], forwards, strict=False):
        pair = OverlapPair(tuple(in_flight), forward, vpp - 1 - number, tuple(finished))
        found[pair] = None
        if forward is not None:
            in_flight[forward] += 1
        in_flight[pair.backward_chunk] -= 1
        finished[pair.backward_chunk] = min(pp, finished[pair.backward_chunk] + 1)
    return tuple(found)


def _dualpipev_pairs(pp: int, stage: int, count: int) -> tuple[OverlapPair, ...]:
    """The pairs of DualPipeV, and its backwards that run alone."""
    in_flight, finished, pending = [0, 0], [0, 0], [0, 0]
    found: dict[OverlapPair, None] = {}
    for passes in dualpipev_order(pp, stage, count):
        chunk_of = dict(passes)
        forward, backward = chunk_of.get("forward"), chunk_of.get("backward", chunk_of.get("dgrad"))
        if backward is not None:
            delayed = tuple(pending) if any(pending) else ()
            found[OverlapPair(tuple(in_flight), forward, backward, tuple(finished), delayed)] = None
            in_flight[backward] -= 1
            finished[backward] = min(pp, finished[backward] + 1)
            pending[backward] += "dgrad" in chunk_of
        if "wgrad" in chunk_of:
            pending[chunk_of["wgrad"]] -= 1
        if forward is not None:
            in_flight[forward] += 1
    return tuple(found)


def stage_overlap_pairs(plan: Plan, stage: int) -> tuple[OverlapPair, ...]:
    """The pairs of a rank of a plan."""
    layout = plan.layout
    return overlap_pairs(layout.pipeline_schedule, layout.pp, layout.vpp, stage, max(1, plan.num_microbatches))
