"""A discrete-event simulation of a step on thousands of ranks, whose speeds differ and jitter.

The closed form of `time/step.py` has every rank at the same speed. Here each pass of each pipeline runs when its rank
is free and what it needs has arrived, and takes the time of the slowest rank that it waits for: ranks of one stage
exchange tokens in every layer, so that they are one group with the time of their slowest. Such groups are folded into
one, and only pipelines that do not meet before the gradients are reduced are simulated apart, as an array. `threefold
estimate --jitter` calls `simulate_step`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.cost.expert_load import is_uneven, load_of
from threefold.cost.rates import Rates, rates_of
from threefold.cost.stage_contents import chunk_layers, stage_contents
from threefold.cost.time.communication import expert_copy_seconds
from threefold.cost.time.pipeline_timeline import (
    PipelineTimeline,
    TimedPass,
    Together,
    needs,
    pass_seconds,
    stage_passes,
)
from threefold.cost.time.step import LAYER_TERMS, chance_deviation, hop_seconds, step_time
from threefold.plan.plan import Plan

Vector = NDArray[np.float64]
MOST_RANKS, MOST_PASSES = 16_384, 200_000
AFTER = ("dp", "optimizer", "offload", "other")  # terms of what comes once, when all pipelines have ended
DRAWS = 20  # steps


@dataclass(frozen=True, slots=True)
class Simulation:
    """Steps that were simulated, in seconds."""

    seconds: tuple[float, ...]  # of each step, in order of length
    even_seconds: float  # of a step whose ranks are all equally fast
    closed_seconds: float  # by the closed form
    num_ranks: int
    num_groups: int  # that were simulated apart
    timeline: PipelineTimeline  # of one pipeline of the first step

    @property
    def median_seconds(self) -> float:
        return self.seconds[len(self.seconds) // 2]

    def to_json(self) -> dict[str, Any]:
        return {
            "level": "simulated",
            "median_seconds": self.median_seconds,
            "longest_seconds": self.seconds[-1],
            "even_seconds": self.even_seconds,
            "closed_seconds": self.closed_seconds,
            "ranks": self.num_ranks,
            "groups": self.num_groups,
        }


def simulate_step(plan: Plan, jitter: float, spread: float = 0.0, draws: int = DRAWS, seed: int = 0) -> Simulation:
    """Simulate steps of a plan. `jitter` is the relative deviation of each pass of a rank, `spread` that of the speeds
    of ranks, which stay as they are. With an uneven load (`job.load`) each step has the skew of its place in the load's
    period, and each pass deviates as the rows of its largest ranks do by chance. Raises where the plan is too large."""
    layout, count = plan.layout, max(1, plan.num_microbatches)
    if layout.gpus > MOST_RANKS or 3 * count * layout.chunks > MOST_PASSES:
        raise ValueError(f"simulations have at most {MOST_RANKS:,} ranks and {MOST_PASSES:,} passes")
    group = math.lcm(layout.tp * layout.cp, layout.ep * layout.etp)
    stage_ranks = layout.gpus // layout.pp
    pipelines = max(1, stage_ranks // group)
    rates = rates_of(plan)
    step, order = step_time(plan, rates), _order(plan, count)
    skews = load_of(plan).by_step if is_uneven(plan) else (None,)
    by_skew = {skew: pass_seconds(plan, step_time(plan, rates, skew)) for skew in skews}
    copies, chance = _load_seconds(plan, step.stage, rates)
    after = copies + sum(step_time(plan, rates, skews[0]).terms[name] for name in AFTER)
    hop = hop_seconds(plan, rates) if layout.pp > 1 else 0.0
    draw = np.random.default_rng(seed)
    ends: list[float] = []
    first: list[list[TimedPass]] = []
    for number in range(draws):
        slow = [np.exp(spread * _slowest(draw, pipelines, group)) for _ in range(layout.pp)]
        seconds = by_skew[skews[number % len(skews)]]

        def noise() -> Vector:
            late = np.maximum(0.0, 1 + chance * draw.standard_normal(pipelines)) if chance else 1.0
            return np.asarray(np.exp(jitter * _slowest(draw, pipelines, group)) * late)

        timed, end = _timed(order, seconds, hop, slow, noise)
        ends.append(float(end.max()) + after)
        first = first if number else timed
    even_ranks, even = _timed(order, by_skew[skews[0]], hop, [np.ones(1)] * layout.pp, lambda: np.ones(1))
    timeline = PipelineTimeline(tuple(map(tuple, first or even_ranks)), count, max(rank[-1].end for rank in first))
    even_seconds = float(even[0]) + after
    return Simulation(
        tuple(sorted(ends)), even_seconds, step.step_seconds, layout.gpus, pipelines * layout.pp, timeline
    )


def _load_seconds(plan: Plan, stage: int, rates: Rates) -> tuple[float, float]:
    """Seconds of a step in which experts are copied, and the relative deviation of a pass by chance; zeros where the
    load is balanced."""
    if not is_uneven(plan):
        return 0.0, 0.0
    layers = [layer for chunk in stage_contents(plan)[stage].chunks for layer in chunk_layers(plan, chunk)]
    step, count = step_time(plan, rates, load_of(plan).skew), max(1, plan.num_microbatches)
    microbatch = sum(step.terms[name] for name in LAYER_TERMS) / count
    passes = 2 * plan.layout.vpp  # of a microbatch on a rank: their deviations add up to that of all
    chance = chance_deviation(plan, layers, rates) / microbatch * passes**0.5
    return expert_copy_seconds(plan, rates) * sum(layer.ffn == "moe" for layer in layers), chance


def _order(plan: Plan, count: int) -> list[list[Together]]:
    layout = plan.layout
    split = layout.pipeline_schedule in ("zero-bubble", "dualpipev")
    paired = plan.knobs.ep_overlap and layout.pipeline_schedule in ("interleaved", "dualpipev")
    schedule = layout.pipeline_schedule or "1f1b"
    return [stage_passes(schedule, layout.pp, layout.vpp, stage, count, split, paired) for stage in range(layout.pp)]


def _timed(
    order: Sequence[Sequence[Together]],
    seconds: dict[tuple[str, int], float],
    hop: float,
    slow: Sequence[Vector],
    noise: Any,
) -> tuple[list[list[TimedPass]], Vector]:
    """The passes of the first pipeline, and when the last pass of each pipeline has ended."""
    last = max(each.chunk for rank in order for group in rank for each in group)
    ended: dict[tuple[bool, int, int], Vector] = {}
    passes: list[list[TimedPass]] = [[] for _ in order]
    places, free = [0] * len(order), [np.zeros_like(slow[0]) for _ in order]
    while any(place < len(rank) for place, rank in zip(places, order, strict=True)):
        moved = False
        for number, rank in enumerate(order):
            while places[number] < len(rank):
                group = rank[places[number]]
                wanted = [need for each in group for need in needs(each, last)]
                if any(need not in ended for need in wanted):
                    break
                start = free[number]
                for need in wanted:
                    sent = need != (True, group[0].chunk, group[0].microbatch)  # else the forward of its own chunk
                    start = np.maximum(start, ended[need] + hop * sent)
                end = start + sum(seconds[each.kind, each.chunk] for each in group) * slow[number] * noise()
                for each in group:
                    if each.kind != "wgrad":
                        ended[each.kind == "forward", each.chunk, each.microbatch] = end
                passes[number].append(TimedPass(tuple(group), float(start[0]), float(end[0])))
                free[number], places[number], moved = end, places[number] + 1, True
        if not moved:
            raise ValueError("the passes of the ranks wait for each other")
    return passes, np.max(free, axis=0)


_GRID = np.linspace(-6, 9, 3001)
_LOG_TAIL = np.log([0.5 * math.erfc(z / math.sqrt(2)) for z in _GRID])


def _slowest(draw: np.random.Generator, count: int, ranks: int) -> Vector:
    """The largest of `ranks` normal numbers, drawn `count` times by the tail of the largest."""
    tail = -np.expm1(np.log(draw.random(count)) / ranks)
    return np.asarray(np.interp(-np.log(tail), -_LOG_TAIL, _GRID))
