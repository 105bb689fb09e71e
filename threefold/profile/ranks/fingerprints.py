"""Which ranks are alike, which to look at, and which traces are missing to say more.

A rank's fingerprint is how its step divides into compute, collectives, copies and idle time, and how many collectives
of each kind it runs. Only ranks of the same fingerprint are compared. Rank 0 stands for nobody but itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from threefold.layout.degrees import Layout
from threefold.profile.ranks.collectives import MatchedGroup
from threefold.profile.ranks.rank_trace import RankTrace

_NEAR = 0.05  # of the step, by which shares of alike ranks may differ
_MOST_NAMED = 8  # ranks


@dataclass(frozen=True, slots=True)
class Fingerprint:
    compute: float
    collectives: float
    copies: float
    idle: float
    counts: tuple[tuple[str, float], ...]  # of each kind of collective and axis, per step

    def is_like(self, other: "Fingerprint") -> bool:
        shares = ("compute", "collectives", "copies", "idle")
        return self.counts == other.counts and all(abs(getattr(self, s) - getattr(other, s)) <= _NEAR for s in shares)


def fingerprint(rank: RankTrace) -> Fingerprint:
    steps = rank.steps
    step = steps.spread("step").median or 1.0
    logged, num_steps = rank.collectives, len(steps.budgets)
    counts: dict[str, int] = {}
    for number in logged.group[logged.step >= 0].tolist():
        group = logged.groups[number]
        label = f"{group.kind} {group.axis}"
        counts[label] = counts.get(label, 0) + 1
    return Fingerprint(
        compute=steps.spread("compute_busy").median / step,
        collectives=steps.spread("communication_busy").median / step,
        copies=rank.copy_seconds / step,
        idle=steps.spread("idle").median / step,
        counts=tuple(sorted((label, count / num_steps) for label, count in counts.items())),
    )


def own_seconds(rank: RankTrace) -> float:
    """What a rank needs of a step by itself: the step without exposed communication, in which it waits for others."""
    return rank.steps.spread("step").median - rank.steps.spread("exposed").median


def alike(ranks: Sequence[RankTrace]) -> list[list[int]]:
    """Indices of the ranks in groups of the same fingerprint."""
    groups: list[tuple[Fingerprint, list[int]]] = []
    for number, rank in enumerate(ranks):
        own = fingerprint(rank)
        same = next((members for first, members in groups if first.is_like(own)), None)
        if same is None:
            groups.append((own, [number]))
        else:
            same.append(number)
    return [members for _, members in groups]


def representatives(ranks: Sequence[RankTrace], layout: Layout | None) -> list[int]:
    """The slowest rank by its own time first, then the slowest of every other fingerprint and stage."""
    by_time = sorted(range(len(ranks)), key=lambda number: -own_seconds(ranks[number]))
    chosen = by_time[:1]
    classes = [set(members) for members in alike(ranks)]
    if layout is not None and layout.pp > 1:
        stages: dict[int, set[int]] = {}
        for number, rank in enumerate(ranks):
            if rank.rank is not None and rank.rank < layout.gpus:
                stages.setdefault(layout.coordinate("pp", rank.rank), set()).add(number)
        classes += list(stages.values())
    for members in classes:
        if not members & set(chosen):
            chosen.append(next(number for number in by_time if number in members))
    return chosen


def missing(ranks: Sequence[RankTrace], matched: Sequence[MatchedGroup], layout: Layout | None) -> list[str]:
    """Which further traces would say more, and what they would say."""
    known = {rank.rank for rank in ranks if rank.rank is not None}
    sizes = [rank.capture.world_size for rank in ranks if rank.capture.world_size]
    world = layout.gpus if layout else max(sizes, default=0)
    said = []
    if not known:
        return ["no trace says which rank it is: groups of ranks and stages stay unknown"]
    if layout is not None and layout.pp > 1:
        seen = {layout.coordinate("pp", rank) for rank in known if rank < layout.gpus}
        stages = [stage for stage in range(layout.pp) if stage not in seen]
        if stages:
            said.append(f"one rank of stage {_list(stages)}: their share of the step is unknown")
    groups = {one for rank in ranks for one in rank.collectives.groups if one.ranks}
    by_axis: dict[str, set[int]] = {}
    for one in groups:
        by_axis.setdefault(one.axis, set()).update(set(one.ranks) - known)
    for axis, absent in sorted(by_axis.items()):
        if absent:
            said.append(f"{axis} ranks {_list(sorted(absent))}: whether one of them is late stays open")
    if not said and 0 < len(known) < world:
        said.append(f"{world - len(known)} of {world} ranks: the slowest of them may not be among these")
    unstated = any(not one.group.ranks for one in matched)
    return [*said, *(["groups of ranks: collectives were matched by their order alone"] if unstated else [])]


def _list(numbers: Sequence[int]) -> str:
    more = len(numbers) - _MOST_NAMED
    return ", ".join(map(str, numbers[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
