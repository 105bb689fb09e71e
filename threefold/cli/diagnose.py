"""`threefold diagnose`: what a dead, slow or full job left behind -> what happened, how sure that is, what to do."""

import argparse
import json
import sys

from threefold.api.plans import open_plan
from threefold.cli.command_line.inputs import add_json, print_findings
from threefold.diagnose.diagnosis import diagnose
from threefold.diagnose.part import Context
from threefold.diagnose.redact import Redactor
from threefold.report.diagnosis import diagnosis_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "logs (plain or gzip), flight recorder dumps, or the folder of a run; several files are those of one job"
    parser.add_argument("files", nargs="+", metavar="FILE", help=kinds)
    parser.add_argument("--plan", metavar="PLAN", help="the plan that ran (TOML), where the files do not say it")
    parser.add_argument("--raw", action="store_true", help="show paths, hosts, tokens and prompts as they are")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    plan = None
    if args.plan:
        parsed, findings = open_plan(args.plan, [])
        plan = parsed.plan
        if plan is None:
            return print_findings(findings, args.json)
    found = diagnose(args.files, Context(plan=plan, redact=Redactor(args.raw)))
    if args.json:
        json.dump(found.to_json(), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        print(diagnosis_text(found))
    return 1 if any(finding.severity == "error" for finding in found.findings) else 0
