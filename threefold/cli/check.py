"""`threefold check`: every finding about a plan at once."""

import argparse
import sys
from pathlib import Path

from threefold.cli.inputs import add_plan_arguments, missing_package, plan_from, print_findings
from threefold.cli.rehearse import verdict_of
from threefold.findings import FindingsError, did_you_mean, in_order
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan
from threefold.rules.all import RULES, blockers, check, explain, known_slugs, repair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, optional=True)
    parser.add_argument("--explain", metavar="SLUG", help="what a rule holds, why, how to confirm, how to fix")
    parser.add_argument("--rehearse", action="store_true", help="run every stage without the cluster: does it fit?")
    parser.add_argument("--here", action="store_true", help="judge by this machine too: its GPUs, versions, packages")
    parser.add_argument(
        "--fix", metavar="OUT", help="write the plan with the fixes of all errors to OUT, and judge that"
    )


def run(args: argparse.Namespace) -> int:
    if args.explain:
        return _explain(args.explain)
    if args.plan is None:
        print("threefold check: give a plan file, or --explain SLUG", file=sys.stderr)
        return 2
    parsed, findings = plan_from(args)
    plan = parsed.plan
    if plan is not None and args.fix:
        plan = _fixed(args, plan)
        if plan is None:
            return 1
    if plan is None:
        return print_findings(findings, args.json)
    found = [*findings, *check(plan)]
    if args.rehearse and not blockers(found):
        try:
            found += verdict_of(plan)
        except FindingsError as error:
            found += error.findings
        except ModuleNotFoundError as error:
            return missing_package("check", error)
    if args.here:
        from threefold.machine.inventory import this_machine
        from threefold.machine.plan_check import machine_findings

        found += machine_findings(plan, this_machine())
    return print_findings(in_order(found), args.json)


def _fixed(args: argparse.Namespace, plan: Plan) -> Plan | None:
    """Written and told; None where it cannot be written."""
    fixed, applied = repair(plan)
    try:
        Path(args.fix).write_text(dump_plan(fixed), encoding="utf-8")
    except OSError as error:
        print(f"threefold check: cannot write {args.fix}: {error.strerror}", file=sys.stderr)
        return None
    if not args.json:
        for finding in applied:
            print(f"applied: {finding.rule}: {finding.fix_data}")
        print(f"wrote {args.fix} with {len(applied)} fixes")
    return fixed


def _explain(slug: str) -> int:
    said = explain(slug)
    if said is None:
        print(f"threefold check: no rule {slug!r}; {did_you_mean(slug, known_slugs())}", file=sys.stderr)
        return 2
    rule = RULES.get(slug)
    head = f"{slug} ({rule.severity}; target: {rule.target})" if rule else f"{slug} (error; making or running the plan)"
    print(f"{head}\n\n{said.what}\n\nwhy      {said.why}\nconfirm  {said.confirm}\nfix      {said.fix}")
    if rule and rule.follows:
        print(f"follows  {rule.follows}")
    if rule and rule.rows:
        print(f"rows     {' '.join(rule.rows)}")
    return 0
