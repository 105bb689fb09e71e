"""Collectives matched across ranks: how long the transfer takes, and how long ranks wait for the last one to come.

All members of a collective leave it together and enter it when they can. So the shortest participant is a proxy of the
transfer, and what the others spend beyond it is waiting for a late rank (jitter). Instances are matched by their order
among the collectives of the same group and kind, over the whole trace where every rank has equally many, else step by
step. What does not match is counted and left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from threefold.profile.ranks.rank_trace import Group, RankTrace
from threefold.profile.trace import Floats


@dataclass(slots=True)
class MatchedGroup:
    """The matched instances of one kind of collective in one group. Rows are ranks, columns instances."""

    group: Group
    members: tuple[int, ...]  # indices of the ranks' traces
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    is_in_step: NDArray[np.bool_]  # whether the instance was issued in a step that counts
    num_unmatched: int  # instances of any member without a partner

    @property
    def num_matched(self) -> int:
        return int(self.start.shape[1])

    @property
    def is_complete(self) -> bool:
        """Whether every member of the group has a trace; None of its ranks stays open then."""
        return self.group.is_stated and len(self.members) == len(self.group.ranks)

    @property
    def lengths(self) -> NDArray[np.float64]:
        return self.end - self.start

    def transfer_seconds(self) -> float:
        """The shortest participant of every instance that counts, in sum."""
        return float(self.lengths[:, self.is_in_step].min(axis=0).sum()) if self.is_in_step.any() else 0.0

    def wait_seconds(self) -> Floats:
        """For each member, what it spends beyond the shortest participant."""
        lengths = self.lengths[:, self.is_in_step]
        return np.asarray((lengths - lengths.min(axis=0)).sum(axis=1)) if lengths.size else np.zeros(len(self.members))

    def times_last(self) -> NDArray[np.int64]:
        """For each member, in how many instances it was the one that the others waited for."""
        lengths = self.lengths[:, self.is_in_step]
        if not lengths.size:
            return np.zeros(len(self.members), np.int64)
        return np.bincount(lengths.argmin(axis=0), minlength=len(self.members))


def match(ranks: Sequence[RankTrace]) -> list[MatchedGroup]:
    """The collectives that at least two of the traces share."""
    keys: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for number, rank in enumerate(ranks):
        for group in rank.collectives.groups:
            key = (group.kind, group.ranks, group.name if not group.ranks else "")
            if number not in keys.setdefault(key, []):
                keys[key].append(number)
    found = []
    for (kind, group_ranks, _), members in keys.items():
        members = [one for one in members if not group_ranks or ranks[one].rank in (None, *group_ranks)]
        distinct = {ranks[one].rank for one in members if ranks[one].rank is not None}
        is_two_of_one = len(distinct) < sum(ranks[one].rank is not None for one in members)
        if len(members) > 1 and not is_two_of_one:
            matched = _matched(ranks, kind, group_ranks, tuple(members))
            if matched is not None:
                found.append(matched)
    return sorted(found, key=lambda one: -float(one.wait_seconds().sum()))


def _matched(
    ranks: Sequence[RankTrace], kind: str, group_ranks: tuple[int, ...], members: tuple[int, ...]
) -> MatchedGroup | None:
    chosen = []
    for member in members:
        logged = ranks[member].collectives
        wanted = [
            place for place, group in enumerate(logged.groups) if group.kind == kind and group.ranks == group_ranks
        ]
        chosen.append(np.flatnonzero(np.isin(logged.group, wanted)))
    total = sum(map(len, chosen))
    if len({len(one) for one in chosen}) > 1:
        chosen = _by_step(ranks, members, chosen)
    if not len(chosen[0]):
        return None
    logs = [ranks[member].collectives for member in members]
    start = np.stack([log.start[own] for log, own in zip(logs, chosen, strict=True)])
    end = np.stack([log.end[own] for log, own in zip(logs, chosen, strict=True)])
    in_step = np.logical_and.reduce([log.step[own] >= 0 for log, own in zip(logs, chosen, strict=True)])
    first = logs[0].groups[int(logs[0].group[chosen[0][0]])]
    return MatchedGroup(first, members, start, end, in_step, total - start.size)


def _by_step(
    ranks: Sequence[RankTrace], members: tuple[int, ...], chosen: list[NDArray[np.int64]]
) -> list[NDArray[np.int64]]:
    """Instances of the steps in which every member issued equally many. Steps are the same by number, else by order."""
    labels = [_step_labels(ranks[member]) for member in members]
    kept: list[list[NDArray[np.int64]]] = [[] for _ in members]
    for label in labels[0]:
        if not all(label in one for one in labels):
            continue
        parts = [
            own[ranks[member].collectives.step[own] == one[label]]
            for member, own, one in zip(members, chosen, labels, strict=True)
        ]
        if len({len(part) for part in parts}) == 1:
            for place, part in zip(kept, parts, strict=True):
                place.append(part)
    return [np.concatenate([np.empty(0, np.int64), *parts]) for parts in kept]


def _step_labels(rank: RankTrace) -> dict[int, int]:
    """The index of each step window by the number of the step, or by its place where ranges have no numbers."""
    windows = rank.steps.windows.windows
    numbers = [window.number for window in windows]
    if any(number is None for number in numbers) or len(set(numbers)) < len(numbers):
        return {place: place for place in range(len(windows))}
    return {number: place for place, number in enumerate(numbers) if number is not None}
