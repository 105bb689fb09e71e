"""`threefold regress`: find the setting behind a regression or a crash between two plans."""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from threefold.cli.command_line.inputs import duration, percentage, say, whole_number
from threefold.cli.command_line.out import UsageError, end_on_sigterm, print_json
from threefold.compare.regress.command import ELAPSED, Command
from threefold.compare.regress.hunt import Hunted, hunt
from threefold.compare.regress.trials import Trials
from threefold.findings import Finding, FindingsError
from threefold.plan.file import read_plan
from threefold.plan.parse import free_findings
from threefold.plan.plan import Plan
from threefold.report.compare.contract_text import hunted_text
from threefold.rules.all import errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "threefold regress A.toml B.toml [options] -- CMD [ARG ...]"
    parser.add_argument("a", metavar="A.toml", help="the plan that works, or is fast")
    parser.add_argument("b", metavar="B.toml", help="the plan that fails, or is slow")
    parser.add_argument(
        "--repeats",
        type=whole_number(1, 1000),
        default=6,
        metavar="N",
        help="rounds of a plan at most, each beside plan A (6)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the hunt; the same command goes on in it")
    parser.add_argument("--limit", type=duration, default=600.0, metavar="TIME", help="what a trial may take (10m)")
    parser.add_argument(
        "--worse-by", type=percentage, default=2.0, metavar="PERCENT", help="smallest slowdown that counts (2)"
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help=f"key of the time in the JSON that the command prints, or {ELAPSED} (default: step_seconds, or {{run}}'s)",
    )
    parser.add_argument("--anyway", action="store_true", help="compare times also where the work is not comparable")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.epilog = "behind --: the command; {plan} stands for the path of a plan, {run} for a fresh run folder"


def run(args: argparse.Namespace) -> int:
    if not args.command:
        raise UsageError("give the command that tries a plan behind --")
    command = Command(tuple(args.command), args.limit, args.metric)
    trials = None
    try:
        plans = [_read(name) for name in (args.a, args.b)]
        question = _question(plans, command, args)
        folder = args.out or _default_folder(question)
        print(f"trials are kept in {folder}", file=sys.stderr)
        with end_on_sigterm():
            trials = Trials(folder, command, question, say)
            found = hunt(plans[0], plans[1], trials, args.repeats, args.worse_by / 100, say, args.anyway)
    except KeyboardInterrupt:
        print(
            "\nthreefold regress: interrupted; the same command goes on with the trials that are done", file=sys.stderr
        )
        return 130
    _tell(found, folder, args.json)
    return 0


def _tell(found: Hunted, folder: Path, as_json: bool) -> None:
    if as_json:
        print_json({**found.to_json(), "folder": str(folder)})
    else:
        print(hunted_text(found))


def _read(name: str) -> Plan:
    parsed = read_plan(name)
    findings = [*parsed.findings, *free_findings(parsed.free)]
    if parsed.plan is None or errors(findings):
        raise FindingsError(findings or [_no_plan(name)])
    return parsed.plan


def _no_plan(name: str) -> Finding:
    return Finding(
        rule="file-readable", at=name, problem="the file holds no plan", advice="give the path of a plan file"
    )


def _question(plans: list[Plan], command: Command, args: argparse.Namespace) -> dict[str, Any]:
    """What the trials of a folder answer: trials of another question must not be taken for answers."""
    return {
        "a": plans[0].hash,
        "b": plans[1].hash,
        "command": list(command.words),
        "metric": args.metric,
        "limit_seconds": args.limit,
    }


def _default_folder(question: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"regress-{question['a'][:6]}-{question['b'][:6]}-{digest}"
