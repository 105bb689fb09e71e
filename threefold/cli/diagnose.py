"""`threefold diagnose`: what a dead, slow or full job left behind -> what happened, how sure that is, what to do."""

import argparse
from pathlib import Path

from threefold.api.comparisons import diagnose_job
from threefold.api.plans import open_plan, with_choices
from threefold.cli.command_line.inputs import add_json, print_findings
from threefold.cli.command_line.out import is_written, print_json
from threefold.cli.command_line.rehearse import end_progress, progress
from threefold.diagnose.deaths.catalogue import catalogue
from threefold.diagnose.diagnosis import Diagnosis
from threefold.findings import did_you_mean
from threefold.report.diagnosis import diagnosis_summary, diagnosis_text
from threefold.report.html.diagnosis_page import diagnosis_page
from threefold.safe_files import write_aside

CANNOT_JUDGE = 125  # what `git bisect run` takes for: skip this commit
UNKNOWN = "unknown"  # a death that is not in the catalogue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = (
        "logs (plain or gzip), flight recorder dumps, memory snapshots, traces, or the folder of a run; several files "
        "are those of one job"
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help=kinds)
    parser.add_argument("--plan", metavar="PLAN", help="the plan that ran (TOML), where the files do not say it")
    parser.add_argument("--raw", action="store_true", help="show paths, hosts, tokens and prompts as they are")
    parser.add_argument(
        "--fail-on",
        type=_death,
        metavar="DEATH",
        help="for git bisect run: exit with 1 where the job died of this, with 125 where it died of something else or "
        "nothing can be said, with 0 where it took steps and did not die",
    )
    parser.add_argument("--out", metavar="FILE", help="also write the diagnosis as a page for a browser (.html)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    plan = None
    if args.plan:
        parsed, findings = with_choices(*open_plan(args.plan))
        plan = parsed.plan
        if plan is None:
            return print_findings(findings, args.json)
    say = progress() or (lambda text: None)
    try:
        found = diagnose_job(*args.files, plan=plan, raw=args.raw, say=say)
    finally:
        end_progress()
    if args.out:
        content = diagnosis_page(found).encode()
        if not is_written("diagnose", args.out, lambda: write_aside(Path(args.out), content)):
            return 1
    if args.json:
        print_json({"summary": diagnosis_summary(found), **found.to_json()}, allow_nan=False)
    else:
        print(diagnosis_text(found))
    if args.fail_on:
        return _bisection_code(found, args.fail_on)
    return 1 if any(finding.rule == "file-readable" for finding in found.findings) else 0


def _death(text: str) -> str:
    known = [death.slug for death in catalogue() if death.role != "notice"]
    if text != UNKNOWN and text not in known:
        raise argparse.ArgumentTypeError(f"no death is called {text}; {did_you_mean(text, known)}")
    return text


def _bisection_code(found: Diagnosis, death: str) -> int:
    """1 where the job died of `death`, 0 where it did not die, 125 where nothing can be said about this commit."""
    if found.death is None:
        return 0 if found.has_steps else CANNOT_JUDGE
    return 1 if found.death == death else CANNOT_JUDGE
