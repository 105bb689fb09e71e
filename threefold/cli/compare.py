"""`threefold compare`: two plans, runs or traces side by side, and which difference explains how much."""

import argparse
import sys
from functools import partial

from threefold.api.comparisons import compare_runs
from threefold.cli.command_line.inputs import add_chip_file, percentage, print_findings, step_window
from threefold.cli.command_line.out import drawn, print_json
from threefold.compare.comparison import Comparison
from threefold.findings import FindingsError, in_order
from threefold.report.compare.comparison_text import comparison_text

CANNOT_JUDGE = 125  # what `git bisect run` takes for: skip this commit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "a plan file, the folder of a run, a trace, or the output of `threefold profile --json`"
    parser.add_argument("a", metavar="A", help=kinds)
    parser.add_argument("b", metavar="B", help="the same; a plan against a run is predicted against measured")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--fail-above",
        type=percentage,
        metavar="PERCENT",
        help="exit with 1 where B is certainly slower than A by more than this, with 125 where nothing can be judged",
    )
    parser.add_argument(
        "--window", type=step_window, metavar="FIRST:LAST", help="steps whose times count (default: the steady ones)"
    )
    parser.add_argument("--anyway", action="store_true", help="compare also where the work is not comparable")
    parser.add_argument(
        "--declare",
        action="append",
        metavar="FIELD",
        help="a field, or a table such as layout, that may differ; any other difference is then refused",
    )
    add_chip_file(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw what explains the change into an image (PNG, SVG)")


def run(args: argparse.Namespace) -> int:
    try:
        found = compare_runs(args.a, args.b, args.window, args.anyway, args.chip_file, args.declare)
    except FindingsError as error:
        code = print_findings(in_order(error.findings), args.json)
        return CANNOT_JUDGE if args.fail_above is not None else code
    if args.json:
        print_json(found.to_json() | _judged(found, args.fail_above), allow_nan=False)
    else:
        print(comparison_text(found))
    code = _exit_code(found, args.fail_above)
    return max(code, drawn("compare", args.plot, partial(_plot, found))) if args.plot else code


def _exit_code(found: Comparison, fail_above: float | None) -> int:
    if fail_above is None:
        return 0
    if found.speed is None or found.speed.verdict == "too few steps":
        print("threefold compare: there are too few step times to judge by", file=sys.stderr)
        return CANNOT_JUDGE
    if found.speed.is_slower_by(fail_above):
        print(f"threefold compare: B is slower than A by more than {fail_above:g} %", file=sys.stderr)
        return 1
    return 0


def _judged(found: Comparison, fail_above: float | None) -> dict[str, object]:
    if fail_above is None or found.speed is None:
        return {}
    return {"fail_above": {"percent": fail_above, "failed": found.speed.is_slower_by(fail_above)}}


def _plot(found: Comparison, path: str) -> None:
    from threefold.report.plots import plot_comparison  # which loads matplotlib

    plot_comparison(found, path)
