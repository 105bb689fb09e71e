"""`threefold check`: every finding about a plan at once."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from threefold.api.plans import check, on_measured_chip
from threefold.cli.command_line.inputs import (
    add_chip_file,
    add_plan_arguments,
    plan_from,
    print_findings,
)
from threefold.cli.command_line.out import UsageError, print_json
from threefold.cli.command_line.rehearse import verdict_of
from threefold.diagnose.deaths.catalogue import death_named
from threefold.findings import Finding, FindingsError, Kind, Severity, as_overrides, did_you_mean, in_order
from threefold.lookup.unjudged import Unjudged, unjudged
from threefold.machine.own_chip_file import NO_CHIP_FILE
from threefold.plan.file import dump_plan
from threefold.plan.parse import Parsed
from threefold.plan.plan import Plan
from threefold.rules.all import (
    RULES,
    blockers,
    errors,
    explain,
    known_slugs,
    raised_by,
    repair,
    severity_of,
)
from threefold.units import format_many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, optional=True)
    add_chip_file(parser)
    parser.add_argument(
        "--explain", metavar="SLUG", help="what a rule holds or a death of `diagnose` is, how to confirm, how to fix"
    )
    parser.add_argument("--rehearse", action="store_true", help="run every stage without the cluster: does it fit?")
    parser.add_argument("--here", action="store_true", help="judge by this machine too: its GPUs, versions, packages")
    parser.add_argument("--unjudged", action="store_true", help="list what nothing judged: settings, machines, data")
    parser.add_argument(
        "--fix",
        metavar="OUT",
        help="write the plan with all fixes to OUT, and judge that; --fix=suggestions --out OUT: and suggestions",
    )
    parser.add_argument("--out", metavar="OUT", help="where --fix=suggestions writes the plan")


def run(args: argparse.Namespace) -> int:
    if args.explain:
        return _explain(args.explain, args.json)
    if args.plan is None:
        raise UsageError("give a plan file, or --explain SLUG")
    if (args.fix == SUGGESTIONS) != (args.out is not None):
        raise UsageError("--fix OUT, or --fix=suggestions --out OUT")
    parsed, findings = plan_from(args)
    done = 0
    if args.fix is not None and parsed.readable is None:
        parsed, findings, done = _made_readable(args, findings)
    plan = parsed.plan or parsed.readable
    if plan is None:
        return _not_written(args, findings)
    try:
        plan = on_measured_chip(plan, args.chip_file)
    except FindingsError as error:
        return print_findings(in_order([*findings, *error.findings]), args.json)
    if args.fix is not None:
        fixed = _fixed(args, plan, findings, done)
        if fixed is None:
            return 1
        plan, findings = fixed
    found = check(plan, findings, NO_CHIP_FILE)  # the rates are resolved already
    if args.rehearse and not blockers(found):
        try:
            found += verdict_of(plan)
        except FindingsError as error:
            found += error.findings
    if args.here:
        from threefold.machine.inventory import this_machine
        from threefold.machine.plan_check import machine_findings

        found += machine_findings(plan, this_machine())
    return _tell(args, plan, in_order(found), unjudged(plan, not errors(found), args.here, args.rehearse))


def _tell(args: argparse.Namespace, plan: Plan, found: list[Finding], left: Unjudged) -> int:
    """The findings, the rates behind them where they are not the shipped ones, and what was not judged."""
    if args.json:
        more = {"not_judged": left.line} | ({"unjudged": left.to_json()} if args.unjudged else {})
        return print_findings(found, as_json=True, more=more)
    code = print_findings(found, as_json=False)
    if plan.cluster.measured:
        origin = plan.cluster.measured.sources.get("measured", "undated")
        print(f"rates: of a chip file ({origin}); --chip-file none takes the shipped ones")
    print(left.text if args.unjudged else left.line)
    return code


SUGGESTIONS = "suggestions"
_SEVERITIES: tuple[Severity, ...] = ("error", "warning")  # what a note offers is for an A/B to decide


def _made_readable(args: argparse.Namespace, findings: list[Finding]) -> tuple[Parsed, list[Finding], int]:
    """The plan read again with defaults in the fields left free, where suggestions are asked for, and their number."""
    is_asked = args.fix == SUGGESTIONS
    fixes = [(one.rule, one.fix) for one in findings if is_asked and one.rule == "no-free-field" and one.fix]
    for rule, fix in fixes:
        args.overrides += [f"{path}={json.dumps(value)}" for path, value in fix.items()]
        if not args.json:
            print(f"applied suggestion: {rule}: {as_overrides(fix)}")
    return *plan_from(args), len(fixes)


def _not_written(args: argparse.Namespace, findings: list[Finding]) -> int:
    """Where nothing can be judged, because no model is known, nothing can be fixed either."""
    if args.fix:
        print(f"threefold check: {args.out or args.fix} was not written: there is no plan to fix", file=sys.stderr)
    untried = [one if one.rule in ("known-model", "no-free-field") else replace(one, fix=None) for one in findings]
    return print_findings(untried, args.json)


def _fixed(
    args: argparse.Namespace, plan: Plan, findings: list[Finding], done: int
) -> tuple[Plan, list[Finding]] | None:
    """The plan with its fixes, written and told, and what of parsing is left; None where it cannot be written. `done`
    fixes were needed to read it."""
    kinds: tuple[Kind, ...] = ("fix", "suggestion") if args.fix == SUGGESTIONS else ("fix",)
    out = args.out or args.fix
    fixed, applied = repair(plan, findings, _SEVERITIES, kinds=kinds)
    left = [one for one in findings if (one.rule, one.at) not in {(fix.rule, fix.at) for fix in applied}]
    try:
        Path(out).write_text(dump_plan(fixed), encoding="utf-8")
    except OSError as error:
        print(f"threefold check: cannot write {out}: {error.strerror}", file=sys.stderr)
        return None
    if not args.json:
        for finding in applied:
            why = f" ({finding.advice})" if finding.fix_kind == "suggestion" and finding.advice else ""
            print(f"applied {finding.fix_kind}: {finding.rule}: {as_overrides(finding.fix or {})}{why}")
        unread = [finding.at for finding in errors(left)]
        without = f", without {', '.join(unread)}, which could not be read" if unread else ""
        print(f"wrote {out} with {format_many(done + len(applied), 'fix')}{without}")
    return fixed, left


def _explain(slug: str, as_json: bool) -> int:
    said, death = explain(slug), death_named(slug)
    if said is None and death is not None:
        facts = {"cause": death.cause, "confirm": death.confirm, "fix": death.fix, "source": death.source}
        head = f"{slug} ({death.role}; read in logs by `threefold diagnose`)"
        text = "\n".join([head, "", *(f"{name:8} {value}" for name, value in facts.items())])
        print(json.dumps({"death": slug, "role": death.role, **facts}, indent=2) if as_json else text)
        return 0
    if said is None:
        near = did_you_mean(slug, known_slugs()) or "`threefold rules` lists them"
        raise UsageError(f"no rule {slug!r}; {near}")
    rule = RULES.get(slug)
    if as_json:
        print_json({"rule": slug, "severity": severity_of(slug), **asdict(said)})
        return 0
    raised = f"target: {rule.target}" if rule else f"raised by {raised_by(slug)}"
    lines = [f"{slug} ({severity_of(slug)}; {raised})", "", said.what, ""]
    lines += [f"why      {said.why}", f"confirm  {said.confirm}", f"fix      {said.fix}"]
    print("\n".join(lines))
    if rule and rule.follows:
        print(f"follows  {rule.follows}")
    if rule and rule.rows:
        print(f"rows     {' '.join(rule.rows)} (docs/coverage.md)")
    return 0
