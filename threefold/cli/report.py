"""`threefold report`: a plan, a run or a tuning as one page for a browser."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threefold.api.comparisons import profile_run
from threefold.api.plans import load_plan, on_measured_chip, open_plan
from threefold.cli.command_line.inputs import add_chip_file, add_json, print_findings
from threefold.cli.command_line.out import is_written
from threefold.diagnose.runs.run_health import judge_run, slow_ranks_of
from threefold.findings import Finding, FindingsError, in_order
from threefold.plan.plan import Plan
from threefold.profile.analyse import Profile
from threefold.profile.readers.run_folder import PROFILE, find_traces
from threefold.profile.readers.run_record import is_run_folder, read_run
from threefold.report.html.plan_view import view_plan
from threefold.report.html.report import Subject, report_page
from threefold.report.html.tuning_picture import Tuning
from threefold.rules.all import errors
from threefold.safe_files import check_inside, read_json_object, write_aside
from threefold.tune.ledger import LEDGER, open_ledger
from threefold.tune.result import RESULT_FILE, WINNER_FILE
from threefold.units import format_bytes

MOST_TRACE_BYTES = 2**24  # of all traces of a run, compressed; reading larger ones is for `threefold profile`
EFFECTS = "effects.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="PLAN|RUN|TUNING", help="a plan file, or the folder of a run or a tuning")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="of a plan: fields to override")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="the page (default report.html)")
    add_chip_file(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    path = Path(args.subject)
    if path.is_dir() and args.overrides:
        print("threefold report: the plan of a run or a tuning is as it ran: leave out overrides", file=sys.stderr)
        return 2
    try:
        subject = open_subject(args.subject, args.overrides, args.chip_file)
    except FindingsError as error:
        return print_findings(in_order(error.findings), args.json)
    page = report_page(subject).encode()
    out = Path(args.out)
    if not is_written("report", args.out, lambda: write_aside(out, page)):
        return 1
    findings = [*subject.findings, *(subject.view.findings if subject.view else ())]
    if args.json:
        said = {"kind": subject.kind, "file": str(out), "bytes": len(page)}
        json.dump({**said, "findings": [one.to_json() for one in findings]}, sys.stdout, indent=2)
        print()
    else:
        print(f"{out}: report of the {subject.kind} {subject.name}, {format_bytes(len(page))}; open it in a browser")
    return 1 if errors(findings) else 0


def open_subject(name: str, overrides: list[str], chip_file: str | None) -> Subject:
    """What a report is about. Raises findings where it cannot be read."""
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


def _plan_subject(name: str, overrides: list[str], chip_file: str | None) -> Subject:
    parsed, findings = open_plan(name, overrides)
    plan = parsed.plan or parsed.readable
    if plan is None:
        raise FindingsError(findings)
    return Subject("plan", Path(name).name, view_plan(on_measured_chip(plan, chip_file), findings))


def _run_subject(folder: Path, chip_file: str | None) -> Subject:
    run = read_run(folder)
    view = view_plan(on_measured_chip(run.plan, chip_file))
    profile, notes = _profile(folder, run.plan)
    findings = [*run.findings, *judge_run(run, slow_ranks_of(folder))]
    return Subject("run", str(folder), view, findings, run=run, effects=_effects(folder), profile=profile, notes=notes)


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
