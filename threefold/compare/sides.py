"""What is compared: a plan file, the folder of a run, or a trace, each read into a `Side`.

`threefold compare` calls `open_side` twice. A plan has an estimate, a run has measurements and its plan's estimate, a
trace has what `threefold profile` says of it. A trace is read by a function that is passed in, so that this module does
not depend on one reader; the output of `threefold profile --json` is taken as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from threefold.cost.cp_exchange import resolve_exchange
from threefold.cost.estimate import WALLS, Estimate, estimate
from threefold.cost.layer_work import expert_skew
from threefold.findings import Finding, FindingsError
from threefold.plan.file import read_plan
from threefold.plan.parse import free_findings
from threefold.plan.plan import Plan
from threefold.profile.readers.run_record import RunRecord, is_run_folder, read_run
from threefold.remedies.advise import Advice
from threefold.rules.all import advice, blockers, errors, judge
from threefold.safe_files import UnsafeFileError, read_json
from threefold.search.recompute import resolve_recompute

Kind = Literal["plan", "run", "trace"]
Profile = dict[str, Any]  # as `threefold profile --json` prints it
ReadTrace = Callable[[Path], Profile]

TRACE_SUFFIXES = (".json", ".gz", ".sqlite", ".sqlite3", ".db", ".nsys-rep", ".qdrep", ".pickle")
MAX_PROFILE_BYTES = 2**24  # output of `threefold profile --json`; a larger file is taken for a trace
PROFILE_KEYS = frozenset({"span_seconds", "walls"})


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two things that are compared."""

    name: str  # as it was given
    kind: Kind
    plan: Plan | None = None
    run: RunRecord | None = None
    guess: Estimate | None = None  # the plan's estimate, at the run's own expert loads
    skew: float = 1.0  # load of the busiest expert rank over the mean, from the run's loads
    profile: Profile | None = None
    findings: tuple[Finding, ...] = ()  # warnings about what was read

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What could help its plan by estimate. Traces say it by what was seen (`fixes` of the profile)."""
        is_estimated = self.plan is not None and self.guess is not None and self.profile is None
        return advice(self.plan) if self.plan is not None and is_estimated else ()

    @property
    def is_measured(self) -> bool:
        return self.kind != "plan"


def open_side(name: str, read_trace: ReadTrace | None = None, dress: Callable[[Plan], Plan] | None = None) -> Side:
    """Read one side. Raises findings where there is nothing to compare.

    `dress` gives a plan the facts of a chip file.
    """
    path = Path(name)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        is_folder = is_file = False
    if is_folder:
        return _open_run(name, path, read_trace, dress)
    if is_file and name.lower().endswith(TRACE_SUFFIXES):
        return Side(name, "trace", profile=_read_profile(path, read_trace))
    return _open_plan(name, dress)


def _unreadable(at: Path | str, problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="file-readable", at=str(at), problem=problem, advice=advice)])


def _open_plan(name: str, dress: Callable[[Plan], Plan] | None) -> Side:
    parsed = read_plan(name)
    findings = [*parsed.findings, *free_findings(parsed.free)]
    if parsed.plan is None or errors(findings):
        raise FindingsError(findings)
    plan, more = resolve_recompute(resolve_exchange(parsed.plan))
    plan = dress(plan) if dress else plan
    if refused := blockers(judge(plan)):  # the estimate of an impossible plan misleads
        raise FindingsError(refused)
    return Side(name, "plan", plan=plan, guess=estimate(plan), findings=(*findings, *more))


def _open_run(name: str, folder: Path, read_trace: ReadTrace | None, dress: Callable[[Plan], Plan] | None) -> Side:
    if not is_run_folder(folder):
        return _open_traces(name, folder, read_trace)
    run = read_run(folder)
    plan = resolve_exchange(run.plan)
    plan = dress(plan) if dress else plan
    skew = _skew(run, plan)
    profile, findings = _profile_of_run(folder, read_trace)
    guess = None if blockers(judge(plan)) else estimate(plan, skew=skew)
    return Side(name, "run", plan, run, guess, skew, profile, (*run.findings, *findings))


def _open_traces(name: str, folder: Path, read_trace: ReadTrace | None) -> Side:
    """A folder of traces, as `threefold profile` reads it."""
    try:
        if read_trace is not None:
            return Side(name, "trace", profile=read_trace(folder))
    except FindingsError as error:
        if any(finding.rule != "trace-readable" for finding in error.findings):
            raise
    advice = "give a plan file, traces, or the folder of a run, in which plan.toml and metrics.jsonl are"
    raise _unreadable(folder, "the folder holds neither a run nor traces", advice)


def _skew(run: RunRecord, plan: Plan) -> float:
    """The load of the busiest expert rank over the mean in the run's last step; 1 where the run does not say."""
    experts, ep = plan.model.num_experts, plan.layout.ep
    loads = [sum(column) for column in zip(*run.loads, strict=False)] if run.loads else []
    if ep == 1 or len(loads) != experts or experts % ep or not sum(loads) > 0:
        return 1.0
    return expert_skew(loads, ep)


def _profile_of_run(folder: Path, read_trace: ReadTrace | None) -> tuple[Profile | None, list[Finding]]:
    """What the run's own traces say, where it has some; a trace that cannot be read is a warning."""
    if read_trace is None or not (folder / "profile").is_dir():
        return None, []
    try:
        return read_trace(folder), []
    except FindingsError as error:
        return None, [_as_warning(finding) for finding in error.findings]


def _as_warning(finding: Finding) -> Finding:
    return Finding(finding.at, finding.problem, advice=finding.advice, severity="warning", rule=finding.rule)


def _read_profile(path: Path, read_trace: ReadTrace | None) -> Profile:
    """The output of `threefold profile --json`, or a trace, which that verb's reader turns into the same."""
    try:
        found = read_json(path, MAX_PROFILE_BYTES) if path.suffix == ".json" else None
    except (UnsafeFileError, ValueError):
        found = None
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise _unreadable(path, problem, "give the path of a trace or of a plan file") from None
    if isinstance(found, dict) and found.keys() >= PROFILE_KEYS:
        return found
    if read_trace is None:
        raise _unreadable(path, "traces cannot be read here", "give the output of `threefold profile --json`")
    return read_trace(path)


_WALL = {term: wall for wall, terms in WALLS.items() for term in terms}


@dataclass(frozen=True, slots=True)
class TermRow:
    """Seconds of one term on both sides."""

    name: str
    wall: str
    a: float
    b: float

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "wall": self.wall, "a": self.a, "b": self.b, "change": self.b - self.a}


def estimated_terms(a: Side, b: Side, scale: float) -> list[TermRow]:
    """Terms of the two estimates; `scale` converts a step of B to the work of a step of A."""
    if a.guess is None or b.guess is None:
        return []
    old, new = a.guess.time.terms, b.guess.time.terms
    rows = [TermRow(name, _WALL.get(name, ""), old[name], new[name] * scale) for name in old]
    return sorted((row for row in rows if row.a or row.b), key=lambda row: -abs(row.b - row.a))


def wall_of(side: Side) -> str | None:
    """The wall that a trace shows, else the one of the estimate."""
    if side.profile is not None and isinstance(side.profile.get("dominant"), str):
        return str(side.profile["dominant"])
    return side.guess.wall if side.guess else None
