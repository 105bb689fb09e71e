"""`threefold contract`: what must not move while a plan, a run or a foreign job is measured."""

import argparse
import sys
from pathlib import Path

from threefold.api.comparisons import contract_of
from threefold.cli.command_line.inputs import add_json
from threefold.cli.command_line.out import print_json
from threefold.compare.contract import differences, undeclared
from threefold.compare.read_contract import write_contract_file
from threefold.report.compare.contract_text import check_text, contract_text, verdict_of

SOURCES = "a plan file, the folder of a run, the logs of a job, or a contract that was written before"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", metavar="FILE", help=f"{SOURCES}; several logs are those of one job")
    add_contract_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the contract here, as JSON with its hash")
    add_json(parser)


def add_contract_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments about a contract that is to be kept; `validate` has them too."""
    parser.add_argument("--against", metavar="FILE", help=f"the contract to keep: {SOURCES}")
    parser.add_argument(
        "--declare",
        action="append",
        default=[],
        metavar="FIELD",
        help="a field, or a table such as layout, that may differ: the variable of the experiment",
    )
    parser.add_argument("--plan", metavar="PLAN", help="the plan that ran (TOML), where logs do not say it")


def run(args: argparse.Namespace) -> int:
    contract = contract_of(*args.sources, plan=args.plan)
    frozen = contract_of(args.against) if args.against else None
    if args.out is not None:
        write_contract_file(contract, args.out)
    found = differences(frozen, contract) if frozen else []
    more = undeclared(found, args.declare)
    if args.json:
        answer = contract.to_json()
        if frozen:
            kept = {"against": frozen.hash, "kept": not more, "verdict": verdict_of(found, more)}
            answer |= {"check": kept | {"differences": [each.to_json() for each in found]}}
        print_json(answer)
    else:
        print(check_text(contract, frozen, found, args.declare) if frozen else contract_text(contract))
        if args.out is not None:
            print(f"wrote {args.out}", file=sys.stderr)
    return 1 if more else 0
