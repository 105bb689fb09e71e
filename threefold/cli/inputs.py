"""Arguments that several verbs share, and reading a plan from them."""

import argparse
import json
import sys
from dataclasses import replace
from typing import TextIO

from threefold.cost.chip_file import read_chip_file
from threefold.cost.cp_exchange import resolve_exchange
from threefold.findings import Finding, FindingsError, in_order
from threefold.machine.own_chip_file import NO_CHIP_FILE, priced_here
from threefold.plan.file import read_plan
from threefold.plan.parse import Parsed, change, free_findings
from threefold.plan.plan import Plan
from threefold.report.terminal import findings_text
from threefold.search.recompute import resolve_recompute
from threefold.spec.stacks import TARGETS

OUR_ENGINE = "threefold"
MOST_SECONDS = 1e9  # thirty years; what torch takes as a limit ends somewhere above


def add_plan_arguments(
    parser: argparse.ArgumentParser, optional: bool = False, target: str = "judge the plan for this stack"
) -> None:
    parser.add_argument("plan", nargs="?" if optional else None, help="a plan file (TOML)")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="fields to override, such as layout.ep=16")
    parser.add_argument("--target", choices=TARGETS, help=target)
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def add_chip_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chip-file",
        metavar="FILE",
        help="facts and rates of a machine (TOML), or 'none' (default: what `threefold calibrate` measured here)",
    )


def on_measured_chip(plan: Plan, chip_file: str | None) -> tuple[Plan, list[Finding]]:
    """The plan with the facts and rates of a chip file, or with those that were measured on this machine."""
    if chip_file is None:
        return priced_here(plan), []
    if chip_file == NO_CHIP_FILE:
        return plan, []
    found, findings = read_chip_file(chip_file)
    if found is None or (findings := found.mismatch(plan.cluster.chip)):
        return plan, in_order(findings)
    return found.applied(plan), []


def plan_from(args: argparse.Namespace, keep_budget: bool = False) -> tuple[Parsed, list[Finding]]:
    """The parsed plan and what was found on the way; a draft's free fields are findings.

    A memory budget becomes names and an open `cp_exchange` a choice, but for a verb that still changes the plan, and
    with it what is best.
    """
    extra = [f'target="{args.target}"'] if args.target else []
    parsed = read_plan(args.plan, [*args.overrides, *extra])
    findings = [*parsed.findings, *free_findings(parsed.free)]
    if parsed.readable is not None and not keep_budget:
        try:
            plan, more = resolve_recompute(resolve_exchange(parsed.readable))
        except FindingsError as error:
            bare = change(parsed.readable, {"knobs.recompute": None})  # for rules to judge the rest
            return replace(parsed, plan=None, readable=bare), in_order([*findings, *error.findings])
        parsed = replace(parsed, plan=plan if parsed.plan else None, readable=plan)
        findings += more
    return parsed, in_order(findings)


def for_our_engine(plan: Plan) -> Plan:
    """The plan as our engine runs it, whatever its target: with the choices made that only our engine has."""
    return plan if plan.target == OUR_ENGINE else resolve_exchange(change(plan, {"target": OUR_ENGINE}))


def seconds(text: str) -> float:
    """A limit in an argument. Not a number and none at all would never be over, less than nothing at once."""
    value = float(text)
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MOST_SECONDS:g} seconds")
    return value


def print_findings(findings: list[Finding], as_json: bool, out: TextIO | None = None) -> int:
    """Text goes to `out` where standard output is for something else."""
    bad = any(finding.severity == "error" for finding in findings)
    if as_json:
        json.dump({"ok": not bad, "findings": [finding.to_json() for finding in findings]}, sys.stdout, indent=2)
        print()
    else:
        print(findings_text(findings), file=out)
    return 1 if bad else 0


def missing_package(verb: str, error: ModuleNotFoundError) -> int:
    """Say which package a verb lacks. A module of our own that is missing is a fault, not a missing package."""
    if (error.name or "").startswith("threefold"):
        raise error
    print(f"threefold {verb}: {error.name} is not installed: pip install 'threefold[train]'", file=sys.stderr)
    return 1
