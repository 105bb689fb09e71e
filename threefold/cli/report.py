"""`threefold report`: a plan, a run or a tuning as one page for a browser."""

import argparse
from pathlib import Path

from threefold.api.reports import make_report
from threefold.cli.command_line.inputs import add_chip_file, add_json
from threefold.cli.command_line.out import UsageError, is_written, print_json
from threefold.rules.all import errors
from threefold.safe_files import write_aside
from threefold.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="PLAN|RUN|TUNING", help="a plan file, or the folder of a run or a tuning")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="of a plan: fields to override")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="the page (default report.html)")
    parser.add_argument(
        "--jitter", type=float, metavar="X", help="also draw a simulated step, each pass off by X, such as 0.02"
    )
    add_chip_file(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if Path(args.subject).is_dir() and args.overrides:
        raise UsageError("the plan of a run or a tuning is as it ran: leave out overrides")
    try:
        found = make_report(args.subject, args.overrides, args.chip_file, args.jitter)
    except ValueError as error:
        raise UsageError(f"--jitter: {error}") from None
    page, out = found.html.encode(), Path(args.out)
    if not is_written("report", args.out, lambda: write_aside(out, page)):
        return 1
    if args.json:
        said = {"kind": found.kind, "file": str(out), "bytes": len(page)}
        print_json({**said, "findings": [one.to_json() for one in found.findings]})
    else:
        print(f"{out}: report of the {found.kind} {found.name}, {format_bytes(len(page))}; open it in a browser")
    return 1 if errors(found.findings) else 0
