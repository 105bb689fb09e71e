"""Which collective of which group its members disagree about, and which ranks all others wait for.

For example, rank 0 waits in all_reduce number 5 on tp for rank 1, which waits in a call on ep for rank 3, which is in
no call: then rank 3 is late, whatever group a reader looks at first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from threefold.diagnose.hangs.flight_recorder import Call, Dump

Sort = Literal["missing", "operation", "sizes", "stuck"]
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv", "coalesced")  # sizes may differ by rank
_EVEN = ("all_gather", "allgather", "reduce_scatter", "all_reduce", "allreduce", "broadcast")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first call of a group that its members do not agree about."""

    group: str
    members: tuple[int, ...]
    sort: Sort
    calls: Mapping[int, Call]  # by rank, of the members that started it
    late: tuple[int, ...]  # members that did not start it, or started something else

    @property
    def call(self) -> Call:
        """The call as most members made it."""
        return next(call for rank, call in sorted(self.calls.items()) if rank not in self.late)

    @property
    def created_ns(self) -> int:
        return min(call.created_ns for call in self.calls.values())

    @property
    def is_open(self) -> bool:
        """Whether a member still waits in it, which the ring of a job that was aborted need not say."""
        return any(not call.is_over for call in self.calls.values())


def find_disagreements(dumps: Sequence[Dump]) -> list[Disagreement]:
    """The first disagreement of each group, the earliest first."""
    found = []
    for (group, _), members in _members(dumps).items():
        known = {dump.rank: dump for dump in dumps if dump.rank in members}
        rings = {
            rank: {call.number: call for call in dump.calls if call.group == group and call.peers is None}
            for rank, dump in known.items()
        }
        if disagreement := _first(group, members, rings):
            found.append(disagreement)
    found.sort(key=lambda one: one.created_ns)
    return [one for one in found if one.is_open] or found


def _members(dumps: Sequence[Dump]) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    """The ranks of each group. Two groups of one name and other ranks are two. gloo does not say the ranks: there they
    are those whose ring has calls of the group, and all of them for the group of all ranks."""
    groups: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for dump in dumps:
        for group in {call.group for call in dump.calls}:
            stated = dump.groups.get(group, ())
            groups.setdefault((group, stated), set()).update(stated or [dump.rank])
    everyone = {dump.rank for dump in dumps}
    for (group, stated), ranks in groups.items():
        if not stated and any("default_pg" in dump.descriptions.get(group, "") for dump in dumps):
            ranks |= everyone
    return {key: tuple(sorted(ranks)) for key, ranks in groups.items()}


def _first(group: str, members: tuple[int, ...], rings: Mapping[int, Mapping[int, Call]]) -> Disagreement | None:
    numbers = [number for ring in rings.values() for number in ring]
    if not numbers:
        return None
    oldest = max((min(ring) for ring in rings.values() if ring), default=0)  # older calls have left a ring
    for number in range(oldest, max(numbers) + 1):
        calls = {rank: ring[number] for rank, ring in rings.items() if number in ring}
        if not calls:
            continue
        if late := tuple(sorted(rings.keys() - calls.keys())):
            return Disagreement(group, members, "missing", calls, late)
        if late := _minority({rank: call.operation for rank, call in calls.items()}):
            return Disagreement(group, members, "operation", calls, late)
        if late := _minority({rank: _sizes(call) for rank, call in calls.items()}):
            return Disagreement(group, members, "sizes", calls, late)
        if not all(call.is_over for call in calls.values()):
            behind = tuple(rank for rank, call in calls.items() if not call.is_over and not call.has_started)
            late = behind if 0 < len(behind) < len(calls) else ()
            return Disagreement(group, members, "stuck", calls, late)
    return None


def _sizes(call: Call) -> object:
    """What must be equal on all ranks."""
    is_even = any(word in call.operation for word in _EVEN) or not any(word in call.operation for word in _UNEVEN)
    return (call.input_sizes, call.output_sizes) if is_even else None


def _minority(values: Mapping[int, object]) -> tuple[int, ...]:
    """Ranks whose value is not that of most ranks; where two are as frequent, not that of the first rank."""
    counts: dict[object, int] = {}
    for rank in sorted(values):
        counts[values[rank]] = counts.get(values[rank], 0) + 1
    most = max(counts, key=lambda value: counts[value])
    return tuple(sorted(rank for rank, value in values.items() if value != most))


@dataclass(frozen=True, slots=True)
class Roots:
    """The ranks that all others wait for, directly or not, and who waits in between."""

    ranks: tuple[int, ...]
    links: Mapping[int, Call]  # rank in between -> the call in which it waits
    is_circle: bool = False  # every late rank waits for another one


def find_roots(start: Disagreement, all_found: Sequence[Disagreement], dumps: Sequence[Dump]) -> Roots:
    """Follow the late ranks of `start` to the calls that they wait in themselves."""
    by_rank = {dump.rank: dump for dump in dumps}
    roots, links, queue, seen = set[int](), dict[int, Call](), list(start.late), set[int]()
    while queue:
        rank = queue.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        waits = next(((call, late) for call, late in _waits(rank, by_rank, all_found)), None)
        if waits is None:
            roots.add(rank)
        else:
            links[rank] = waits[0]
            queue += waits[1]
    if not roots and links:
        return Roots(tuple(sorted(links)), {}, is_circle=True)
    return Roots(tuple(sorted(roots)), links)


def _waits(
    rank: int, by_rank: Mapping[int, Dump], all_found: Sequence[Disagreement]
) -> Iterator[tuple[Call, tuple[int, ...]]]:
    """Calls in which a rank waits for others, other than the one that it is late for, with those others."""
    for other in all_found:
        call = other.calls.get(rank)
        if call and not call.is_over and other.late and rank not in other.late:
            yield call, other.late
    dump = by_rank.get(rank)
    for call in reversed(dump.calls if dump else ()):
        if call.peers and not call.is_over and dump:
            ranks = dump.groups.get(call.group) or tuple(sorted(by_rank))
            ends = [ranks[end] if end < len(ranks) else end for end in call.peers]
            if peer := [end for end in ends if end != rank]:
                yield call, tuple(peer)
                return
