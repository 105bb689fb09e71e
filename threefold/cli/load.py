"""`threefold load`: how a run's router loaded its experts, and what that costs."""

import argparse
from pathlib import Path

from threefold.api.loads import load_of_run
from threefold.cli.command_line.inputs import add_json
from threefold.cli.command_line.out import UsageError, is_written, print_json
from threefold.report.load import load_page, load_text
from threefold.rules.all import errors
from threefold.safe_files import write_aside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="RUN|FILE", help="the folder of a run, or its routing.json or loads.json")
    parser.add_argument("--ep", type=int, metavar="N", help="expert ranks to add up experts for (default: the run's)")
    parser.add_argument("--out", metavar="FILE", help="draw the loads as a page for a browser")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    try:
        found, findings = load_of_run(args.subject, args.ep)
    except ValueError as error:
        raise UsageError(f"--ep {args.ep}: {error}") from None
    page = load_page(found, findings).encode() if args.out else b""
    if args.out and not is_written("load", args.out, lambda: write_aside(Path(args.out), page)):
        return 1
    if args.json:
        print_json(found.to_json() | {"findings": [finding.to_json() for finding in findings]})
    else:
        print(load_text(found, findings))
        if args.out:
            print(f"wrote {args.out}")
    return 1 if errors(findings) else 0
