"""A hang, from the dumps of its ranks: what they disagree about, who is late and where, and which axis that is."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.diagnose.files import Kind
from threefold.diagnose.hangs.disagreement import Disagreement, Roots, find_disagreements, find_roots
from threefold.diagnose.hangs.flight_recorder import Dump, rank_of, read_dump
from threefold.diagnose.part import Context, unreadable
from threefold.diagnose.redact import Redactor
from threefold.findings import Finding
from threefold.launch.hang_diagnosis import format_ranks
from threefold.plan.plan import Plan
from threefold.units import format_many

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
