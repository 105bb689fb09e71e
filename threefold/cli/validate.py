"""`threefold validate`: whether a run or a foreign job can be accepted, check by check."""

import argparse

from threefold.api.comparisons import validate
from threefold.cli.command_line.inputs import add_json, step_window
from threefold.cli.command_line.out import print_json
from threefold.cli.contract import add_contract_arguments
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
    found = validate(*args.sources, window=args.window, against=args.against, declared=args.declare, plan=args.plan)
    if args.json:
        print_json(found.to_json())
    else:
        print(validation_text(found))
    return EXIT_CODES[found.verdict]
