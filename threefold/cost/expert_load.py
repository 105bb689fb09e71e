"""Uneven load of the experts (`job.load`) in numbers that prices need: skews of ranks and domains, chance, copies.

A skew is the rows of the largest expert-parallel rank over the mean. `load_of(plan)` is cached and does without numpy,
because a search asks it for every degree of EP. Shares are those of `plan/load.py`; how far drawn tokens fall from
them is added as independent normal deviations of the ranks, and the largest rank is taken in expectation.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from threefold.layout.replicas import place_replicas
from threefold.plan.load import BALANCED, PERIOD, PREFIX, expert_shares, load_problems, read_load
from threefold.plan.plan import Plan

_MOST_LAYERS = 8  # that are looked at, of those of a model
_MOST_LEVELS = 3  # of skew, at which a layer is priced
_POINTS = 24  # of the integral over the largest rank
_TAIL = 5.0  # standard deviations at which it ends
RARE = 3.0  # standard deviations of chance up to which the memory of the largest rank is priced: one step of 700
UNSURE = 0.5  # of what an uneven load is predicted to cost, the part by which the band is wider: nothing was measured


@dataclass(frozen=True, slots=True)
class SkewLevel:
    """A part of all layers and steps, with its mean skews."""

    part: float
    rank: float = 1.0
    domain: float = 1.0  # rows of the largest NVLink domain over the mean

    @classmethod
    def of(cls, rank: float, num_ranks: int, in_domain: int) -> "SkewLevel":
        """One rank has `rank` times the mean, and the others share the rest."""
        others = (num_ranks - rank) / max(1, num_ranks - 1)
        return cls(1.0, rank, (rank + (in_domain - 1) * others) / in_domain)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows that the largest rank has of all layers in one step, over the mean, and their deviation by chance."""

    skew: float
    deviation: float


@dataclass(frozen=True, slots=True)
class PlanLoad:
    """The load of a plan's experts."""

    levels: tuple[SkewLevel, ...] = (SkewLevel(1.0),)
    deviation: float = 0.0  # of the skew of one layer and microbatch, by chance
    steps: tuple[StepRows, ...] = (StepRows(1.0, 0.0),)  # of one period
    by_step: tuple[float, ...] = (1.0,)  # the mean skew of the layers in each of them
    dropped: float = 0.0  # of the token copies, above the capacity of their experts
    copied: float = 0.0  # experts that the rank with most sends or receives in a layer, to balance the load

    @property
    def skew(self) -> float:
        """The mean skew of layers and steps: the time of a layer is that of its largest rank."""
        return sum(level.part * level.rank for level in self.levels)

    @property
    def largest(self) -> float:
        """The rows for which memory is priced."""
        return max(step.skew + RARE * step.deviation for step in self.steps)

    def chance_above(self, skew: float, num_groups: int) -> float:
        """The part of steps in which the largest rank of any of `num_groups` groups has more rows than that."""
        return sum(_some(_tail(skew, step), num_groups) for step in self.steps) / len(self.steps)


EVEN = PlanLoad()


def is_uneven(plan: Plan) -> bool:
    return plan.job.load != BALANCED and plan.model.is_moe and plan.layout.ep > 1 and plan.job.routing == "learned"


def load_of(plan: Plan) -> PlanLoad:
    """The load of the experts of a plan, as its knobs balance it."""
    moe, layout, knobs = plan.model.moe, plan.layout, plan.knobs
    if moe is None or not is_uneven(plan) or moe.num_experts % layout.ep:  # the last is refused by a rule
        return EVEN
    if load_problems(plan.job.load, moe.num_experts):  # as a file that cannot be read
        return EVEN
    num_layers = max(1, sum(layer.ffn == "moe" for layer in plan.model.layers) // layout.pp)
    tokens = plan.job.micro_batch * plan.job.seq_len // layout.cp // layout.tp * layout.ep * layout.etp
    recomputes = "moe" in knobs.recompute or plan.full_recompute
    in_domain = max(1, plan.link("ep").in_domain)
    copies = plan.expert_slots, knobs.expert_balance_every
    case = _Case(
        plan.job.load, moe.num_experts, moe.top_k, layout.ep, in_domain, tokens, num_layers, recomputes, *copies
    )
    return _load(replace(case, capacity=plan.expert_capacity_factor))


def largest_rows(plan: Plan) -> float:
    """The skew for which memory is priced. Buffers of a fixed size are as large as they are, whatever comes."""
    if not is_uneven(plan):
        return 1.0
    if plan.has_rank_capacity and plan.job.capacity_factor is not None:
        return min(plan.job.capacity_factor, float(plan.layout.ep))
    return load_of(plan).largest


def load_band(plan: Plan) -> float:
    """By how much the band of the step is wider than that of a balanced load, relative to the step."""
    return UNSURE * min(1.0, load_of(plan).skew - 1) if is_uneven(plan) else 0.0


def expected_largest(count: int) -> float:
    """The largest of `count` standard normal numbers, in expectation."""
    return _largest(((0.0, 1.0, count),))[0] if count > 1 else 0.0


@dataclass(frozen=True, slots=True)
class _Case:
    """Everything that a load depends on, as a key of the cache."""

    load: str
    num_experts: int
    top_k: int
    ep: int
    in_domain: int
    tokens: int  # of a microbatch, in an expert-parallel group
    num_layers: int  # with experts, of a stage
    recomputes: bool  # so that one layer's rows are held at a time, and not those of all
    slots: int  # of a rank, for copies of experts
    every: int  # steps after which these are placed anew
    capacity: float | None = None


@lru_cache(maxsize=512)
def _load(case: _Case) -> PlanLoad:
    num_layers = min(_MOST_LAYERS, case.num_layers)
    count = len(read_load(case.load.removeprefix(PREFIX)).counts) if case.load.startswith(PREFIX) else PERIOD
    changes = case.load.startswith(PREFIX) or case.load in ("drift", "burst")
    skews: list[SkewLevel] = []
    deviations, steps, dropped, copied = [], [], 0.0, 0.0
    for step in range(0, count, math.ceil(count / PERIOD)) if changes else (0,):
        held = [0.0] * case.ep
        largest = 0.0
        for layer in range(num_layers):
            wanted = _mean_shares(case, layer, step)
            shares = wanted if case.capacity is None else [min(p, case.capacity / case.num_experts) for p in wanted]
            dropped += sum(wanted) - sum(shares)
            ranks, moved = _rank_loads(case, layer, step, shares)
            copied += moved
            skew, deviation = _largest([(mean, _deviation(case, mean), n) for mean, n in Counter(ranks).items()])
            domains = [sum(ranks[i : i + case.in_domain]) / case.in_domain for i in range(0, case.ep, case.in_domain)]
            skews.append(SkewLevel(1.0, max(1.0, skew), max(1.0, *domains)))
            deviations.append(deviation)
            largest = max(largest, skew)
            held = [sum_ + mean for sum_, mean in zip(held, ranks, strict=True)]
        if case.recomputes:
            steps.append(StepRows(max(1.0, largest), max(deviations[-num_layers:])))
            continue
        spread = [
            (sum_ / num_layers, _deviation(case, sum_ / num_layers) / math.sqrt(case.num_layers)) for sum_ in held
        ]
        skew, deviation = _largest([(*row, n) for row, n in Counter(spread).items()])
        steps.append(StepRows(max(1.0, skew), deviation))
    total = len(skews)
    means = [sum(level.rank for level in skews[n : n + num_layers]) / num_layers for n in range(0, total, num_layers)]
    deviation = sum(deviations) / total
    return PlanLoad(_levels(skews), deviation, tuple(steps), tuple(means), dropped / total, copied / total)


def _mean_shares(case: _Case, layer: int, step: int) -> list[float]:
    """The shares of an expert-parallel group: the mean of its source ranks."""
    num_sources = min(case.ep, PERIOD) if case.load == "ragged-sources" or case.load.startswith(PREFIX) else 1
    rows = [expert_shares(case.load, case.num_experts, layer, step, rank, case.top_k) for rank in range(num_sources)]
    return [sum(column) / num_sources for column in zip(*rows, strict=True)] if num_sources > 1 else rows[0]


def _rank_loads(case: _Case, layer: int, step: int, shares: Sequence[float]) -> tuple[list[float], float]:
    """Rows of each rank over the mean, and copies of experts that the rank with most sends or receives."""
    local, moved = -(-case.num_experts // case.ep), 0.0
    ranks = [sum(shares[rank * local : (rank + 1) * local]) for rank in range(case.ep)]
    if case.slots:
        planned = step // case.every * case.every - 1  # placed by the counts of the step before
        replicas = place_replicas(_mean_shares(case, layer, planned), case.ep, case.slots)
        ranks = replicas.rank_loads(shares)
        sent = Counter(e // local for here in replicas.copied_to for e in here)
        moved = float(max([*sent.values(), *map(len, replicas.copied_to)]))
    return [round(share * case.ep, 6) for share in ranks], moved


def _deviation(case: _Case, mean: float) -> float:
    """Deviation of a rank's rows over the mean, where tokens choose independently of each other."""
    share = min(1.0, mean / case.ep)
    return case.ep * math.sqrt(share * (1 - share) / (case.tokens * case.top_k))


def _largest(groups: Sequence[tuple[float, float, int]]) -> tuple[float, float]:
    """Mean and deviation of the largest of independent normal numbers: (mean, deviation, how many) of each group."""
    top = max(mean for mean, _, _ in groups)
    width = max(deviation for mean, deviation, _ in groups if mean == top)
    near = [group for group in groups if group[0] + _TAIL * group[1] > top - _TAIL * width]
    if width < 1e-9:
        return top, 0.0
    low, high = top - _TAIL * width, max(mean + _TAIL * deviation for mean, deviation, _ in near)
    each = (high - low) / _POINTS
    first = second = 0.0
    for n in range(_POINTS):
        x = low + (n + 0.5) * each
        below = math.prod((0.5 * math.erfc((m - x) / (d * math.sqrt(2) + 1e-300))) ** count for m, d, count in near)
        first += (1 - below) * each
        second += 2 * (x - low) * (1 - below) * each
    return low + first, math.sqrt(max(0.0, second - first * first))


def _levels(skews: Sequence[SkewLevel]) -> tuple[SkewLevel, ...]:
    """The skews in a few groups of about the same size, each with its means."""
    in_order = sorted(skews, key=lambda skew: (skew.rank, skew.domain))
    size = math.ceil(len(in_order) / _MOST_LEVELS)
    parts = (in_order[first : first + size] for first in range(0, len(in_order), size))
    return tuple(_merged(part, len(in_order)) for part in parts)


def _merged(part: Sequence[SkewLevel], total: int) -> SkewLevel:
    count = len(part)
    return SkewLevel(count / total, sum(skew.rank for skew in part) / count, sum(skew.domain for skew in part) / count)


def _tail(skew: float, step: StepRows) -> float:
    """The chance that a step's rows are above `skew`."""
    if step.deviation == 0.0:
        return float(step.skew > skew)
    return 0.5 * math.erfc((skew - step.skew) / (step.deviation * math.sqrt(2)))


def _some(chance: float, count: int) -> float:
    """The chance that at least one of `count` independent events happens."""
    return -math.expm1(count * math.log1p(-min(chance, 1 - 1e-16)))


def per_thousand_steps(chance: float) -> float:
    """The chance of an event in a thousand steps, from that in one."""
    return _some(chance, 1000)
