"""`threefold validate`: whether a run or a foreign job can be accepted, check by check."""

import argparse
import json
import sys

from threefold.api.comparisons import validate
from threefold.cli.command_line.inputs import add_json, print_findings, step_window
from threefold.cli.contract import add_contract_arguments
from threefold.findings import FindingsError, in_order
from threefold.report.compare.contract_text import validation_text

EXIT_CODES = {"accepted": 0, "screened": 3, "not enough evidence": 3, "benchmark-only": 3, "rejected": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", metavar="FILE", help="the folder of a run, or logs and traces of one job")
    parser.add_argument(
        "--window", type=step_window, metavar="FIRST:LAST", help="the declared steps: accepting takes 50 and more"
    )
    add_contract_arguments(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    try:
        found = validate(*args.sources, window=args.window, against=args.against, declared=args.declare, plan=args.plan)
    except FindingsError as error:
        return print_findings(in_order(error.findings), args.json)
    if args.json:
        json.dump(found.to_json(), sys.stdout, indent=2)
        print()
    else:
        print(validation_text(found))
    return EXIT_CODES[found.verdict]
