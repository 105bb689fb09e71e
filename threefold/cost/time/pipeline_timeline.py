"""When each pipeline rank runs which pass of a step: the schedule with the seconds of the estimate, for pictures.

`report/html/pipeline_picture.py` draws `pipeline_timeline(plan, step)`. The order of the passes is the order of
`engine/schedule/pipeline_order.py`, which needs torch: a test compares the two. A pass starts when its rank is free and
the pass that it waits for has ended; sending between stages takes no time here. A forward is taken for a third of the
work of a chunk, input and weight gradients for a third each, and recompute comes before the input gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from threefold.cost.memory.threefold.delayed_wgrad import splits_backward, splits_some_backwards
from threefold.cost.memory.threefold.schedule import dualpipev_order, forward_chunk_order
from threefold.cost.rates import Rates, rates_of
from threefold.cost.stage_contents import chunk_layers
from threefold.cost.time.layer import layer_time
from threefold.cost.time.outside_layers import loss_seconds, mtp_projection_seconds, vision_seconds
from threefold.cost.time.step import LAYER_TERMS, StepTime
from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan

MOST_PASSES = 8000  # of a timeline; a larger one is drawn with fewer microbatches, or not at all


class Pass(NamedTuple):
    """One pass of a microbatch through a chunk."""

    kind: str  # "forward", "backward", "dgrad" or "wgrad"
    chunk: int  # of the whole pipeline
    microbatch: int


Together = tuple[Pass, ...]  # one pass, or the forward and backward that EP overlap runs at the same time


class TimedPass(NamedTuple):
    """Passes of a rank with their time in seconds from the start of the step."""

    passes: Together
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """The passes of every pipeline rank in order."""

    ranks: tuple[tuple[TimedPass, ...], ...]
    num_microbatches: int  # that the timeline holds; the plan may have more, which repeat the middle
    seconds: float  # from the first forward to the end of the last pass

    @property
    def idle_fraction(self) -> float:
        """The mean fraction of the time in which a rank waits."""
        busy = sum(one.end - one.start for rank in self.ranks for one in rank)
        return 1 - busy / (self.seconds * len(self.ranks)) if self.seconds else 0.0


def pipeline_timeline(plan: Plan, step: StepTime) -> PipelineTimeline | None:
    """The timeline of a plan; None without a pipeline, and where it would have more than `MOST_PASSES`."""
    layout, count = plan.layout, drawn_microbatches(plan)
    if layout.pp < 2 or 3 * count * layout.chunks > MOST_PASSES:
        return None
    split = splits_backward(plan) or splits_some_backwards(plan)
    paired = plan.knobs.ep_overlap and layout.pipeline_schedule in ("interleaved", "dualpipev")
    order = [
        stage_passes(layout.pipeline_schedule, layout.pp, layout.vpp, stage, count, split, paired)
        for stage in range(layout.pp)
    ]
    ranks = timed_passes(order, pass_seconds(plan, step))
    end = max((one.end for rank in ranks for one in rank), default=0.0)
    return PipelineTimeline(tuple(map(tuple, ranks)), count, end)


def drawn_microbatches(plan: Plan) -> int:
    """The microbatches of a timeline: all of a small step, else so many that the pipeline fills, runs and drains."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    if layout.vpp == 1:
        return min(count, 2 * layout.pp)
    if layout.pipeline_schedule == "dualpipev":
        return min(count, 3 * layout.pp)
    size = forward_chunk_order(layout.pp, 1, count)[0]  # microbatches of a round
    return min(count, 2 * size if 6 * size * layout.chunks <= MOST_PASSES else size)


def stage_passes(
    schedule: str, pp: int, vpp: int, stage: int, count: int, split: bool, paired: bool = False
) -> list[Together]:
    """The passes of a rank in order. `split` runs weight gradients as passes of their own where the schedule has
    them; `paired` runs a forward and a backward together."""
    if schedule == "dualpipev":
        return _dualpipev_passes(pp, stage, count, split, paired)
    size, forwards = forward_chunk_order(pp, vpp, count)
    ahead = (1 if schedule == "zero-bubble" else 2) * (pp - stage - 1) + (vpp - 1) * size + 1
    ahead = min(len(forwards), ahead if vpp > 1 else pp - stage)
    numbers = [*_numbered(forwards)]
    todo = [Pass("forward", chunk * pp + stage, number) for chunk, number in numbers]
    kind = "dgrad" if split else "backward"
    done = [Pass(kind, (vpp - 1 - chunk) * pp + stage, number) for chunk, number in numbers]
    if paired:
        pairs: list[Together] = [*zip(todo[ahead:], done, strict=False)]
        return [*((one,) for one in todo[:ahead]), *pairs, *((one,) for one in done[len(pairs) :])]
    passes: list[Together] = [(one,) for one in todo[:ahead]]
    for number in range(len(done) + (stage if split else 0)):
        passes += [(one,) for one in done[number : number + 1]]
        if split and number >= stage:
            late = done[number - stage]
            passes.append((Pass("wgrad", late.chunk, late.microbatch),))
        passes += [(one,) for one in todo[ahead + number : ahead + number + 1]]
    return passes


def _numbered(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each chunk with the number of its microbatch, which counts up for each chunk."""
    seen: dict[int, int] = {}
    for chunk in chunks:
        seen[chunk] = seen.get(chunk, -1) + 1
        yield chunk, seen[chunk]


def _dualpipev_passes(pp: int, stage: int, count: int, split: bool, paired: bool) -> list[Together]:
    """Without `split` a backward computes its weight gradients at once, and without `paired` passes run in turn."""
    chunks = (stage, 2 * pp - 1 - stage)
    seen: dict[tuple[str, int], int] = {}
    found: list[Together] = []
    for group in dualpipev_order(pp, stage, count):
        together = []
        for kind, chunk in group:
            counted = "backward" if kind == "dgrad" else kind
            if kind == "wgrad" and not split:
                continue
            number = seen[counted, chunk] = seen.get((counted, chunk), -1) + 1
            named = "backward" if kind == "dgrad" and not split else kind
            together.append(Pass(named, chunks[chunk], number))
        found += [tuple(together)] if paired and together else [(one,) for one in together]
    return _numbered_wgrads(found)


def _numbered_wgrads(passes: list[Together]) -> list[Together]:
    """Weight gradients with the microbatches of the input gradients that they belong to, in order."""
    waiting: dict[int, list[int]] = {}
    found = []
    for group in passes:
        for one in group:
            if one.kind == "dgrad":
                waiting.setdefault(one.chunk, []).append(one.microbatch)
        found.append(
            tuple(Pass("wgrad", one.chunk, waiting[one.chunk].pop(0)) if one.kind == "wgrad" else one for one in group)
        )
    return found


def timed_passes(order: Sequence[Sequence[Together]], seconds: dict[tuple[str, int], float]) -> list[list[TimedPass]]:
    """Each rank's passes as early as its order and the passes that they wait for allow. `seconds` is by kind and
    chunk. Raises where the order never ends, which an order of `stage_passes` cannot."""
    last = max((one.chunk for rank in order for group in rank for one in group), default=0)
    ended: dict[tuple[bool, int, int], float] = {}
    found: list[list[TimedPass]] = [[] for _ in order]
    places, free = [0] * len(order), [0.0] * len(order)
    while any(place < len(rank) for place, rank in zip(places, order, strict=True)):
        moved = False
        for number, rank in enumerate(order):
            while places[number] < len(rank):
                group = rank[places[number]]
                wanted = [need for one in group for need in needs(one, last)]
                if any(need not in ended for need in wanted):
                    break
                start = max([free[number], *[ended[need] for need in wanted]])
                end = start + sum(seconds[one.kind, one.chunk] for one in group)
                for one in group:
                    if one.kind != "wgrad":
                        ended[one.kind == "forward", one.chunk, one.microbatch] = end
                found[number].append(TimedPass(tuple(group), start, end))
                free[number], places[number], moved = end, places[number] + 1, True
        if not moved:
            raise ValueError("the passes of the ranks wait for each other")
    return found


def needs(one: Pass, last: int) -> list[tuple[bool, int, int]]:
    """What has to be over before a pass, as keys of `ended`: whether it is a forward, the chunk, the microbatch."""
    kind, chunk, microbatch = one
    if kind == "forward":
        return [(True, chunk - 1, microbatch)] if chunk > 0 else []
    if kind == "wgrad":
        return []
    forward = (True, chunk, microbatch)
    return [forward, (False, chunk + 1, microbatch)] if chunk < last else [forward]


def pass_seconds(plan: Plan, step: StepTime) -> dict[tuple[str, int], float]:
    """Seconds of each kind of pass through each chunk, to the scale of the estimate's slowest rank."""
    rates, count = rates_of(plan), max(1, plan.num_microbatches)
    works = _chunk_works(plan, rates)
    v_shaped = plan.layout.pipeline_schedule == "dualpipev"
    by_rank = [0.0] * plan.layout.pp
    for number, (work, recompute) in enumerate(works):
        by_rank[chunk_rank(number, plan.layout.pp, v_shaped)] += work + recompute
    estimated = sum(step.terms[name] for name in (*LAYER_TERMS, "loss", "vision")) / count
    scale = estimated / max(by_rank) if max(by_rank) > 0 else 1.0
    found: dict[tuple[str, int], float] = {}
    for number, (work, recompute) in enumerate(works):
        third, again = scale * work / 3, scale * recompute
        found |= {("forward", number): third, ("wgrad", number): third}
        found |= {("dgrad", number): third + again, ("backward", number): 2 * third + again}
    return found


def _chunk_works(plan: Plan, rates: Rates) -> list[tuple[float, float]]:
    """Seconds of each chunk for a microbatch: without recompute, and of recompute."""
    layers = [chunk_layers(plan, chunk) for chunk in plan.chunks]
    times = {layer: layer_time(plan, layer, rates) for layer in set(chain.from_iterable(layers))}
    mtp, loss = mtp_projection_seconds(plan, rates), loss_seconds(plan, rates)
    works = []
    for chunk, held in zip(plan.chunks, layers, strict=True):
        recompute = sum(times[layer].recompute for layer in held)
        work = sum(times[layer].total for layer in held) - recompute + chunk.mtp * mtp + (chunk.loss + chunk.mtp) * loss
        works.append((work + (vision_seconds(plan, rates) if chunk.embedding else 0.0), recompute))
    return works
