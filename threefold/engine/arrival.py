"""Who did not come: what ranks last said of themselves, judged. Arithmetic on reports, no process and no clock."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

_LINKS = 8  # of a chain of ranks that wait for each other


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that a rank has started and not ended."""

    operation: str
    number: int  # how many calls its group has had
    line: str  # the group, as every rank of it spells it
    name: str
    ranks: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.operation} number {self.number} on {self.name} ({spell(self.ranks)})"


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself every pulse."""

    pulse: int
    said_at: float  # wall time, to tell a person how long it is silent; never to decide
    phase: str
    idle_seconds: float  # since a call or phase last began or ended
    phase_limit: float | None = None  # None: that of calls; inf: none
    place: str = ""  # where its main thread is
    waits: Waiting | None = None
    calls: Mapping[str, int] = field(default_factory=dict)  # started, by line
    left: bool = False

    @property
    def is_excused(self) -> bool:
        """In a phase that may take long, and still within it."""
        return self.phase_limit is not None and self.idle_seconds < self.phase_limit

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Report":
        fields = json.loads(text)
        if fields["waits"]:
            fields["waits"] = Waiting(**fields["waits"] | {"ranks": tuple(fields["waits"]["ranks"])})
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Verdict:
    late: tuple[int, ...]  # the ranks everybody waits for
    excused: bool  # they are late with leave
    problem: str


def judge(
    call: Waiting, fault: str, reports: Mapping[int, Report | None], silent: Mapping[int, float], own: int
) -> Verdict:
    """`fault`: what the late ranks did wrong. `silent`: not heard of while we listened, with the seconds before."""
    late, links = _late(call, reports, silent, own)
    if not late:
        problem = f"does not end after {seconds(call.seconds)}, though every rank is in it: the transfer itself hangs"
        return Verdict((), False, problem)
    parts = [f"{spell(late)} {fault}"]
    parts += [_where(rank, reports.get(rank), silent, call) for rank in late]
    parts += [f"rank {rank} waits in {waits}" for rank, waits in links.items()]
    seen = [reports.get(rank) for rank in late]
    excused = all(r is not None and r.is_excused for r in seen) and not set(late) & set(silent)
    return Verdict(late, excused, "; ".join(parts))


def _late(
    call: Waiting, reports: Mapping[int, Report | None], silent: Mapping[int, float], own: int
) -> tuple[tuple[int, ...], dict[int, Waiting]]:
    """The ranks at the end of the chain, and those in between that wait themselves, with what they wait in."""
    roots: set[int] = set()
    links: dict[int, Waiting] = {}
    asked, seen = [call], {own}
    for _ in range(_LINKS):
        following: list[Waiting] = []
        for waits in asked:
            for rank in sorted(set(waits.ranks) - seen):
                report = reports.get(rank)
                if rank in silent or report is None or (report.left and not report.waits):
                    roots.add(rank)  # who left in the middle of a call lost a rank itself
                elif report.calls.get(waits.line, 0) < waits.number or _elsewhere(report, waits):
                    if report.waits is None or report.waits.line == waits.line:
                        roots.add(rank)
                    else:
                        links[rank] = report.waits
                        following.append(report.waits)
                else:
                    continue
                seen.add(rank)
        asked = following
    if not roots and links:  # they wait in a circle: each group was entered in another order
        return tuple(sorted(links)), {}
    return tuple(sorted(roots)), links


def _elsewhere(report: Report, waits: Waiting) -> bool:
    """In a call of the same number that is another one: the ranks do not run the same program."""
    mine = report.waits
    return (
        mine is not None
        and (mine.line, mine.number) == (waits.line, waits.number)
        and mine.operation != waits.operation
    )


def _where(rank: int, report: Report | None, silent: Mapping[int, float], call: Waiting) -> str:
    if report is None:
        return f"rank {rank} was never heard of"
    if report.left:
        return f"rank {rank} has left the run"
    if rank in silent:
        return f"rank {rank} has not been heard of for {seconds(silent[rank])}, {_last(report)}"
    if report.waits:
        return f"rank {rank} is in {report.waits} instead"
    return f"rank {rank} is {_last(report)} since {seconds(report.idle_seconds)}"


def _last(report: Report) -> str:
    place = f" at {report.place}" if report.place else ""
    inside = f", in {report.waits}" if report.waits else ""
    return f"in {report.phase or 'no phase'}{place}{inside}"


def behind(calls: Mapping[str, int], reports: Mapping[int, Report | None], names: Mapping[str, str]) -> list[str]:
    """Ranks that have started fewer calls of a group than this one, in words."""
    return [
        f"rank {rank} has started {report.calls[line]} of {count} calls on {names[line]}"
        for rank, report in sorted(reports.items())
        if report is not None
        for line, count in calls.items()
        if line in report.calls and report.calls[line] < count
    ]


def spell(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3 and 5` or `ranks 0-63`: short for a person, whatever their number."""
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


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 or math.isinf(value) else f"{value:.1f} s"
