"""The clocks of several ranks on one time line, with what remains between them.

Each trace is moved by its own start since 1970, where it has one: that joins the ranks of a host. Across hosts clocks
differ by milliseconds. A collective ends everywhere at about the same time, so that the ends of many of them give each
rank's offset, and its drift where enough were seen. The residual is the median distance that is left: a difference of
starts below it proves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from threefold.profile.ranks.collectives import MatchedGroup
from threefold.profile.ranks.rank_trace import RankTrace
from threefold.profile.trace import Floats

ENDING_TOGETHER = (
    "alltoall",
    "allgather",
    "allreduce",
    "reducescatter",
    "barrier",
)  # a broadcast's root may leave first
MIN_INSTANCES = 3  # from which ends say an offset
_MIN_FOR_DRIFT = 20
_BETTER = 0.7  # of the residual, at most, with which a drift is believed


@dataclass(frozen=True, slots=True)
class Clock:
    """How a rank's times become those of the reference: `time + offset + drift * (time - origin)`."""

    offset: float
    drift: float = 0.0
    origin: float = 0.0
    residual: float | None = None  # median seconds that are left; None where no collective was matched
    num_instances: int = 0
    source: str = "none"  # "reference", "collectives", "start of the session", "none"
    skew: float | None = None  # by how much the rank's own clock is wrong; None where only one of the two is known

    def aligned(self, times: Floats) -> Floats:
        return np.asarray(times + self.offset + self.drift * (times - self.origin))


def align(ranks: Sequence[RankTrace], matched: Sequence[MatchedGroup]) -> list[Clock]:
    """The clock of each rank. The reference is the one with most matched collectives."""
    pairs = _ends_of_pairs(matched)
    weight = np.zeros(len(ranks))
    for (one, other), ends in pairs.items():
        weight[[one, other]] += len(ends)
    reference = int(np.argmax(weight)) if len(ranks) else 0
    clocks = [_by_start(ranks, reference, number) for number in range(len(ranks))]
    clocks[reference] = Clock(0.0, residual=0.0, source="reference", skew=0.0)
    done = {reference}
    while True:
        links = [
            (len(ends), one, other)
            for (one, other), ends in pairs.items()
            if (one in done) != (other in done) and len(ends) >= MIN_INSTANCES
        ]
        if not links:
            return clocks
        _, one, other = max(links)
        known, new = (one, other) if one in done else (other, one)
        ends = pairs[one, other] if known == one else pairs[one, other][:, ::-1]
        fitted = _fitted(clocks[known].aligned(ends[:, 0]), ends[:, 1])
        is_dated = clocks[new].source == "start of the session" and clocks[known].skew is not None
        clocks[new] = replace(fitted, skew=fitted.offset - clocks[new].offset if is_dated else None)
        done.add(new)


def _ends_of_pairs(matched: Sequence[MatchedGroup]) -> dict[tuple[int, int], NDArray[np.float64]]:
    """For each two ranks, the ends of the collectives that they share, as rows of two times."""
    ends: dict[tuple[int, int], list[NDArray[np.float64]]] = {}
    for one in matched:
        if one.group.kind in ENDING_TOGETHER:
            first = one.members[0]  # pairs with the first member suffice to join a group
            for place, member in enumerate(one.members[1:], start=1):
                ends.setdefault((first, member), []).append(np.stack([one.end[0], one.end[place]], axis=1))
    return {pair: np.concatenate(parts) for pair, parts in ends.items()}


def _by_start(ranks: Sequence[RankTrace], reference: int, number: int) -> Clock:
    base, own = ranks[reference].capture.epoch_nanoseconds, ranks[number].capture.epoch_nanoseconds
    if ranks[number].path == ranks[reference].path:
        return Clock(0.0, source="start of the session")
    return Clock(0.0) if base is None or own is None else Clock((own - base) / 1e9, source="start of the session")


def _fitted(there: Floats, here: Floats) -> Clock:
    """The clock that brings `here` to `there`."""
    distance = there - here
    offset = float(np.median(distance))
    residual = float(np.median(np.abs(distance - offset)))
    fitted = Clock(offset, residual=residual, num_instances=len(here), source="collectives")
    if len(here) < _MIN_FOR_DRIFT or np.ptp(here) <= 0:
        return fitted
    origin = float(np.median(here))
    near = np.abs(distance - offset) <= max(6 * residual, 1e-9)
    drift, at_origin = np.polyfit(here[near] - origin, distance[near], 1) if near.sum() > 2 else (0.0, offset)
    left = float(np.median(np.abs(distance - at_origin - drift * (here - origin))))
    if left <= _BETTER * residual:
        return Clock(float(at_origin), float(drift), origin, left, len(here), "collectives")
    return fitted
