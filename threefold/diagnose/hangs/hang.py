"""A hang, from the dumps of its ranks: what they disagree about, who is late and where, and which axis that is.

For example, rank 0 waits in all_reduce number 5 on tp for rank 1, which waits in a call on ep for rank 3, which is in
no call: then rank 3 is late, whatever group a reader looks at first.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from threefold.diagnose.files import Kind
from threefold.diagnose.hangs.flight_recorder import Call, Dump, rank_of, read_dump
from threefold.diagnose.part import Context, unreadable
from threefold.diagnose.redact import Redactor
from threefold.findings import Finding
from threefold.launch.hang_diagnosis import format_ranks
from threefold.plan.plan import Plan
from threefold.units import format_many

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


_AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
_MOST_SHOWN = 8
UNKNOWN_PLACE = "an unknown place"
_NAMED_AXES = (  # what Megatron and device meshes call their groups
    (r"EXPERT_TENSOR_(?!AND|MODEL)|mesh_etp", "etp"),
    (r"EXPERT_DATA|mesh_(?:edp|dp_mod_ep|efsdp)", "edp"),
    (r"EXPERT_MODEL|mesh_ep\b", "ep"),
    (r"PIPELINE|mesh_pp", "pp"),
    (r"CONTEXT_PARALLEL_GROUP|mesh_cp", "cp"),
    (r"TENSOR_MODEL|mesh_tp", "tp"),
    (r"DATA_PARALLEL|mesh_(?:dp|fsdp)", "dp"),
)


@dataclass
class Hang:
    """What the dumps of a job say."""

    kind: Kind = "flight recorder"
    ranks: tuple[int, ...] = ()  # whose dumps were read
    missing: tuple[int, ...] = ()  # whose dumps were not given
    first: Disagreement | None = None
    roots: Roots | None = None
    axis: str | None = None
    lines: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"ranks": list(self.ranks), "ranks_without_dump": list(self.missing)}
        if self.first and self.roots:
            value |= {
                "sort": self.first.sort,
                "group": list(self.first.members),
                "axis": self.axis,
                "call": self.first.call.operation,
                "number": self.first.call.number,
                "late_ranks": list(self.roots.ranks),
                "waiting_ranks": sorted(self.first.calls),
            }
        return value | {"lines": self.lines}


def read_dumps(paths: Sequence[Path], context: Context) -> Hang:
    """Read the dumps of all ranks, and find the first collective whose members disagree."""
    found = Hang()
    dumps: list[Dump] = []
    for place, path in enumerate(paths):
        context.say(f"reading dump {place + 1} of {len(paths)}")
        try:
            dumps.append(read_dump(path, place))
        except (OSError, ValueError, EOFError) as error:
            found.findings.append(unreadable(path, error))
    twice = {dump.rank for dump in dumps if [other.rank for other in dumps].count(dump.rank) > 1}
    if twice:
        named = [path.name for path in paths if rank_of(path) in twice or rank_of(path) is None]
        problem = f"{format_ranks(sorted(twice))} has more than one dump: {', '.join(named[:4])}"
        advice = "give the dumps of one job, named as PyTorch names them, with the rank at the end"
        found.findings.append(Finding("dumps", problem, advice=advice, severity="warning", rule="file-readable"))
        dumps = list({dump.rank: dump for dump in dumps}.values())
    describe(found, sorted(dumps, key=lambda dump: dump.rank), context.plan, context.redact)
    return found


def describe(found: Hang, dumps: Sequence[Dump], plan: Plan | None, redact: Redactor) -> None:
    """Put what the dumps say into `found`."""
    found.ranks = tuple(dump.rank for dump in dumps)
    world = {rank for dump in dumps for ranks in dump.groups.values() for rank in ranks}
    if plan:
        world |= set(range(plan.cluster.gpus))
    found.missing = tuple(sorted(world - set(found.ranks)))
    disagreements = find_disagreements(dumps)
    if not disagreements:
        found.lines = _nothing(dumps)
    else:
        found.first = first = disagreements[0]
        found.roots = find_roots(first, disagreements, dumps)
        found.axis = axis_of(first, dumps, plan)
        found.lines = [redact(line) for line in _lines(found, first, found.roots, dumps)]
    if found.missing:
        found.lines.append(f"no dump of {format_ranks(found.missing)}: what they did is not known")


def _lines(found: Hang, first: Disagreement, roots: Roots, dumps: Sequence[Dump]) -> list[str]:
    by_rank = {dump.rank: dump for dump in dumps}
    axis = f" ({found.axis})" if found.axis else ""
    head = f"first disagreement: {first.call} on the group of {format_ranks(first.members)}{axis}"
    waiting = sorted(first.calls.keys() - set(first.late))
    verb = "waits" if len(waiting) == 1 else "wait"
    lines = [head, f"  {format_ranks(waiting)} {verb} at {first.call.where or UNKNOWN_PLACE}"]
    if first.sort == "missing":
        lines.append(f"  {format_ranks(first.late)} did not come")
    elif first.sort == "operation":
        others = {first.calls[rank].operation for rank in first.late}
        lines.append(f"  {format_ranks(first.late)} called {', '.join(sorted(others))} in its place")
    elif first.sort == "sizes":
        call = first.calls[first.late[0]]
        shapes = f"{_shape(call.input_sizes)} for {_shape(first.call.input_sizes)}"
        lines.append(f"  {format_ranks(first.late)} came with other sizes: {shapes}")
    elif first.late:
        lines.append(f"  {format_ranks(first.late)} enqueued it, and its device has not started it")
    else:
        lines.append("  every rank is in it: the transfer itself does not end")
    for rank, call in list(roots.links.items())[:_MOST_SHOWN]:
        lines.append(f"  rank {rank} itself waits in {call} at {call.where or UNKNOWN_PLACE}")
    if roots.is_circle:
        lines.append(f"{format_ranks(roots.ranks)} wait for each other: they entered groups in different orders")
    elif roots.ranks:
        lines.append(f"all others wait for {format_ranks(roots.ranks)}")
    for rank in roots.ranks[:_MOST_SHOWN]:
        dump = by_rank.get(rank)
        last = dump.calls[-1] if dump and dump.calls else None
        said = f"{last} at {last.where or UNKNOWN_PLACE}" if last else "none in its ring"
        lines.append(f"  rank {rank}: its last call is {said}")
    return lines


def _nothing(dumps: Sequence[Dump]) -> list[str]:
    if not dumps:
        return ["no dump could be read"]
    calls = sum(len(dump.calls) for dump in dumps)
    return [f"{format_many(len(dumps), 'dump')} with {format_many(calls, 'call')}: all members agree on every call"]


def _shape(sizes: tuple[Any, ...]) -> str:
    return " ".join(str(list(size)) for size in sizes) or "[]"


def axis_of(first: Disagreement, dumps: Sequence[Dump], plan: Plan | None) -> str | None:
    """The axis of the plan whose group these ranks are, else the axis that the group's own name says."""
    if plan and plan.layout.fits_ranks:
        degrees = {axis: plan.layout.degree(axis) for axis in _AXES}
        for axis, degree in degrees.items():
            if degree == len(first.members) > 1 and plan.layout.group(axis, first.members[0]) == first.members:
                return axis
    for dump in dumps:
        description = dump.descriptions.get(first.group, "")
        for pattern, axis in _NAMED_AXES:
            if re.search(pattern, description):
                return axis
        if description == "default_pg":
            return "all ranks"
    return None
