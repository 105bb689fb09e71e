"""A plan, a run or a tuning as one page for a browser: `threefold.make_report` and `threefold report`. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threefold.api.comparisons import profile_run
from threefold.api.plans import load_plan, on_measured_chip, open_plan, with_choices
from threefold.diagnose.run_health import judge_run, recorded_load, slow_ranks_of
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.profile.analyze import Profile
from threefold.profile.readers.run_folder import PROFILE, find_traces
from threefold.profile.readers.run_record import is_run_folder, read_run
from threefold.report.html.plan_view import view_plan
from threefold.report.html.report import Subject, report_page
from threefold.report.html.tuning_picture import Tuning
from threefold.safe_files import check_inside, read_json_object
from threefold.tune.ledger import LEDGER, open_ledger
from threefold.tune.result import RESULT_FILE, WINNER_FILE
from threefold.units import format_bytes

MOST_TRACE_BYTES = 2**24  # of all traces of a run, compressed; reading larger ones is for `threefold profile`
EFFECTS = "effects.json"


@dataclass(frozen=True, slots=True)
class Report:
    """A page, what it is about, and the findings on it."""

    kind: str  # "plan", "run" or "tuning"
    name: str
    html: str
    findings: tuple[Finding, ...]


def make_report(
    subject: str | Path, overrides: Sequence[str] = (), chip_file: str | None = None, jitter: float | None = None
) -> Report:
    """Draw a plan file, the folder of a run or that of a tuning on one page that needs nothing else.

    `overrides` are changes of a plan file, such as "layout.ep=16"; `chip_file` is that of `estimate`. With `jitter`,
    the deviation of each pass of a rank, a simulated step is drawn too. Raises findings where the subject cannot be
    read, and ValueError where the plan is too large to be simulated.
    """
    found = _subject(str(subject), overrides, chip_file)
    if jitter is not None and found.view is not None and found.view.estimate is not None:
        from threefold.cost.time.simulation import simulate_step  # numpy, which other reports do without

        simulated = simulate_step(found.view.plan, jitter)
        found = replace(found, view=replace(found.view, simulated=simulated, jitter=jitter))
    findings = [*found.findings, *(found.view.findings if found.view else ())]
    return Report(found.kind, found.name, report_page(found), tuple(findings))


def _subject(name: str, overrides: Sequence[str], chip_file: str | None) -> Subject:
    path = Path(name)
    if not path.is_dir():
        return _plan_subject(name, overrides, chip_file)
    if (path / LEDGER).is_file():
        return _tuning_subject(path, chip_file)
    if is_run_folder(path):
        return _run_subject(path, chip_file)
    problem = f"the folder holds neither a run (plan.toml, metrics.jsonl) nor a tuning ({LEDGER})"
    advice = "give a plan file, the folder of `threefold train` or that of `threefold tune`"
    raise FindingsError([Finding(rule="run-readable", at=name, problem=problem, advice=advice)])


def _plan_subject(name: str, overrides: Sequence[str], chip_file: str | None) -> Subject:
    parsed, findings = with_choices(*open_plan(name, overrides))
    plan = parsed.plan or parsed.readable
    if plan is None:
        raise FindingsError(findings)
    return Subject("plan", Path(name).name, view_plan(on_measured_chip(plan, chip_file), findings))


def _run_subject(folder: Path, chip_file: str | None) -> Subject:
    run = read_run(folder)
    view = view_plan(on_measured_chip(run.plan, chip_file))
    profile, notes = _profile(folder, run.plan)
    findings = [*run.findings, *judge_run(run, slow_ranks_of(folder))]
    subject = Subject(
        "run", str(folder), view, findings, run=run, effects=_effects(folder), profile=profile, notes=notes
    )
    return replace(subject, load=recorded_load(run))


def _profile(folder: Path, plan: Plan) -> tuple[Profile | None, list[str]]:
    """What the traces of a run say, where it was profiled; or why they are left out."""
    if not (folder / PROFILE).exists():
        return None, []
    try:
        num_bytes = sum(trace.stat().st_size for trace in find_traces(folder))
        if num_bytes > MOST_TRACE_BYTES:
            said = f"Its traces ({format_bytes(num_bytes)}) are too large for a page: threefold profile {folder}"
            return None, [said]
        return profile_run(folder, plan=plan), []
    except FindingsError as error:
        return None, [f"Its traces are left out: {error.findings[0].problem}."]


def _effects(folder: Path) -> list[Mapping[str, Any]]:
    """Settings of the run with whether they took effect; none where the file is absent or damaged."""
    try:
        found = read_json_object(folder / EFFECTS, within=folder).get("effects")
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _tuning_subject(folder: Path, chip_file: str | None) -> Subject:
    try:
        check_inside(folder / LEDGER, folder)
    except OSError as error:
        found = Finding(
            rule="ledger-readable", at=str(folder / LEDGER), problem=str(error), advice="copy the file there"
        )
        raise FindingsError([found]) from None
    with open_ledger(folder, create=False) as ledger:
        facts = ledger.contract or {}
        trials = [row.to_json() for row in ledger.trials()]
        fields = ledger.fields_of(str(facts.get("plan")))
        verdicts = ledger.verdicts()
    try:
        result: dict[str, Any] | None = read_json_object(folder / RESULT_FILE, within=folder)
    except (OSError, ValueError):
        result = None
    plan, note = _tuned_plan(folder, fields)
    view = None if plan is None else view_plan(on_measured_chip(plan, chip_file))
    return Subject("tuning", str(folder), view, tuning=Tuning(facts, verdicts, trials, result), notes=[note])


def _tuned_plan(folder: Path, fields: Mapping[str, Any]) -> tuple[Plan | None, str]:
    """The winner, else the plan that the tuning began with, and which of them it is; or why neither can be read."""
    winner = folder / WINNER_FILE
    try:
        if not winner.exists():
            return load_plan(fields), "No change is certain so far: the plan below is the one that was given."
        check_inside(winner, folder)
        return load_plan(winner), "The plan below is the winner."
    except (FindingsError, OSError) as error:
        found = error.findings[0].problem if isinstance(error, FindingsError) else str(error)
        return None, f"There is no plan on this page: that of the tuning cannot be read ({found})."
