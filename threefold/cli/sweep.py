"""`threefold sweep`: one field varied, sequence length with CP sized along."""

import argparse
from functools import partial
from typing import Any

from threefold.api.plans import sweep
from threefold.cli.command_line.inputs import add_plan_arguments, plan_from, print_findings
from threefold.cli.command_line.out import UsageError, drawn, print_json
from threefold.findings import Finding, in_order
from threefold.plan.file import parse_overrides
from threefold.report.sweep import sweep_text
from threefold.rules.all import errors
from threefold.search.sweep import Sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument(
        "--over",
        required=True,
        action="append",
        metavar="path=v1,v2,...",
        help="the field to vary, such as job.seq_len=4096,16384",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw throughput and memory into an image (PNG)")


def run(args: argparse.Namespace) -> int:
    if len(args.over) > 1:
        raise UsageError("one field is varied at a time; give --over once")
    path, equals, text = args.over[0].partition("=")
    values = _split(text)
    if not (path.strip() and equals and values):
        raise UsageError(f"--over {args.over[0]!r} is not path=v1,v2,...")
    raw, wrong = _values(path.strip(), values)
    parsed, findings = plan_from(args, keep_budget=True)
    findings = in_order([*findings, *wrong])
    if parsed.plan is None or errors(findings):
        return print_findings(findings, args.json)
    found = sweep(parsed.plan, {path.strip(): raw})
    if args.json:
        print_json(found.to_json())
    else:
        print(sweep_text(found))
    code = 0 if any(point.estimate for point in found.points) else 1
    return max(code, drawn("sweep", args.plot, partial(_plot, found))) if args.plot else code


def _split(text: str) -> list[str]:
    """Values between commas; commas inside brackets or quotes belong to a value."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and depth == 0 and not quote:
            values.append("")
            continue
        if letter in "\"'":
            quote = "" if quote == letter else quote or letter
        elif not quote:
            depth += (letter == "[") - (letter == "]")
        values[-1] += letter
    return [value.strip() for value in values if value.strip()]


def _values(path: str, texts: list[str]) -> tuple[list[Any], list[Finding]]:
    """The values of an override's texts."""
    values: list[Any] = []
    findings: list[Finding] = []
    for text in texts:
        raw, wrong = parse_overrides([f"{path}={text}"])
        values += raw.values()
        findings += [finding for finding in wrong if finding not in findings]
    return values, findings


def _plot(found: Sweep, path: str) -> None:
    from threefold.report.plots import plot_sweep  # which loads matplotlib

    plot_sweep(found, path)
