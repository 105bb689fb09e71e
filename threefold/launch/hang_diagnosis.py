"""Diagnosis of a hang: which ranks did not come to a collective, by the last heartbeats of all ranks.

The watchdog calls `diagnose` and prints the result. This is arithmetic on reports, without processes and clocks. For
example, rank 0 waits in all_reduce number 5 on tp for rank 1, whose report says that it started four calls on tp and
waits in another group for rank 2, which is in no collective: then rank 2 is late.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

_MAX_CHAIN = 8  # length of a chain of ranks that wait for each other


@dataclass(frozen=True, slots=True)
class OpenCollective:
    """A collective that a rank has started and not ended."""

    operation: str
    number: int  # of this call among the calls on its communicator, from 1
    communicator: str  # a key that is the same on all of its ranks
    group_name: str
    ranks: tuple[int, ...]
    seconds: float  # since it started

    def __str__(self) -> str:
        return f"{self.operation} number {self.number} on {self.group_name} ({format_ranks(self.ranks)})"


@dataclass(frozen=True, slots=True)
class RankReport:
    """The heartbeat of one rank."""

    pulse: int  # number of this heartbeat
    sent_at: float  # wall time, which gives the length of a silence
    phase: str
    idle_seconds: float  # since a call or phase last began or ended
    phase_limit: float | None = None  # seconds; None: the limit of collectives, infinity: no limit
    source_line: str = ""  # where the main thread is
    open_call: OpenCollective | None = None  # the oldest one
    calls: Mapping[str, int] = field(default_factory=dict)  # number of calls started, by communicator
    has_left: bool = False

    @property
    def is_excused(self) -> bool:
        """Return whether the rank is in a phase with a limit of its own, and within that limit."""
        return self.phase_limit is not None and self.idle_seconds < self.phase_limit

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankReport":
        fields = json.loads(text)
        if call := fields["open_call"]:
            fields["open_call"] = OpenCollective(**call | {"ranks": tuple(call["ranks"])})
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason why a collective does not end."""

    late_ranks: tuple[int, ...]  # the ranks that all others wait for, directly or not
    is_excused: bool  # the late ranks are in a phase that may take this long
    problem: str


def diagnose(
    call: OpenCollective, fault: str, reports: Mapping[int, RankReport | None], silent: Mapping[int, float], own: int
) -> Diagnosis:
    """Find the ranks that `call` waits for.

    `fault` says in words what the late ranks did wrong. `silent` holds the ranks that sent no heartbeat while this rank
    listened, with the seconds of their silence. `own` is this rank.
    """
    late, links = _find_late(call, reports, silent, own)
    if not late:
        duration = format_seconds(call.seconds)
        problem = f"does not end after {duration}, though every rank is in it: the transfer itself hangs"
        return Diagnosis((), False, problem)
    parts = [f"{format_ranks(late)} {fault}"]
    parts += [_describe(rank, reports.get(rank), silent) for rank in late]
    parts += [f"rank {rank} waits in {open_call}" for rank, open_call in links.items()]
    of_late = [reports.get(rank) for rank in late]
    is_excused = all(r is not None and r.is_excused for r in of_late) and not set(late) & set(silent)
    return Diagnosis(late, is_excused, "; ".join(parts))


def _find_late(
    call: OpenCollective, reports: Mapping[int, RankReport | None], silent: Mapping[int, float], own: int
) -> tuple[tuple[int, ...], dict[int, OpenCollective]]:
    """The ranks at the end of the chain, and the ranks in between with the calls that they wait in."""
    roots: set[int] = set()
    links: dict[int, OpenCollective] = {}
    calls, seen = [call], {own}
    for _ in range(_MAX_CHAIN):
        following: list[OpenCollective] = []
        for current in calls:
            for rank in sorted(set(current.ranks) - seen):
                report = reports.get(rank)
                # A rank that left in the middle of a call lost a peer itself and is no root.
                if rank in silent or report is None or (report.has_left and not report.open_call):
                    roots.add(rank)
                elif report.calls.get(current.communicator, 0) < current.number or _is_in_other_call(report, current):
                    if report.open_call is None or report.open_call.communicator == current.communicator:
                        roots.add(rank)
                    else:
                        links[rank] = report.open_call
                        following.append(report.open_call)
                else:
                    continue
                seen.add(rank)
        calls = following
    if not roots and links:  # they wait in a circle, because they entered the groups in different orders
        return tuple(sorted(links)), {}
    return tuple(sorted(roots)), links


def _is_in_other_call(report: RankReport, call: OpenCollective) -> bool:
    """Return whether the rank is in a call of the same number but another operation: the ranks run different
    programs."""
    other = report.open_call
    return (
        other is not None
        and (other.communicator, other.number) == (call.communicator, call.number)
        and other.operation != call.operation
    )


def _describe(rank: int, report: RankReport | None, silent: Mapping[int, float]) -> str:
    """The position of a late rank, in words."""
    if report is None:
        return f"rank {rank} was never heard of"
    if report.has_left:
        return f"rank {rank} has left the run"
    if rank in silent:
        return f"rank {rank} has not been heard of for {format_seconds(silent[rank])}, {_position(report)}"
    if report.open_call:
        return f"rank {rank} is in {report.open_call} instead"
    return f"rank {rank} is {_position(report)} since {format_seconds(report.idle_seconds)}"


def _position(report: RankReport) -> str:
    line = f" at {report.source_line}" if report.source_line else ""
    inside = f", in {report.open_call}" if report.open_call else ""
    return f"in {report.phase or 'no phase'}{line}{inside}"


def describe_lagging_ranks(
    calls: Mapping[str, int], reports: Mapping[int, RankReport | None], names: Mapping[str, str]
) -> list[str]:
    """One sentence for each communicator on which another rank has started fewer calls than this rank.

    `calls` are the numbers of calls of this rank, `names` the groups in words, both by communicator.
    """
    return [
        f"rank {rank} has started {report.calls[key]} of {count} calls on {names[key]}"
        for rank, report in sorted(reports.items())
        if report is not None
        for key, count in calls.items()
        if key in report.calls and report.calls[key] < count
    ]


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in few words, however many they are: `rank 3`, `ranks 3 and 5` or `ranks 0-63`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [w for run in runs for w in ([f"{run[0]}-{run[-1]}"] if len(run) > 4 else map(str, run))]
    if len(words) > 12:
        words = [*words[:12], f"{len(ranks)} in all"]
    if len(words) == 2:
        words = [" and ".join(words)]
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(words)}"


def format_seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 or math.isinf(value) else f"{value:.1f} s"
