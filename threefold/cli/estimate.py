"""`threefold estimate`: what a plan needs and reaches, predicted."""

import argparse
import json
import math
import sys

from threefold.cli.inputs import add_chip_file, add_plan_arguments, on_measured_chip, plan_from, print_findings
from threefold.cli.rehearse import shares_from, skew_problem
from threefold.cost.estimate import estimate
from threefold.cost.layer_work import expert_skew
from threefold.cost.traffic.by_stack import traffic
from threefold.findings import in_order
from threefold.plan.plan import Plan
from threefold.report.estimate import estimate_text
from threefold.rules.all import PREDICTED, blockers, check, errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    add_chip_file(parser)
    parser.add_argument(
        "--skew", type=float, default=1.0, metavar="X", help="load of the busiest expert rank over the mean (default 1)"
    )
    parser.add_argument(
        "--loads",
        metavar="FILE",
        help="the skew, from tokens of each expert: a JSON list, one a layer, or the folder of a run",
    )


def run(args: argparse.Namespace) -> int:
    if not (math.isfinite(args.skew) and args.skew >= 1):
        print(f"threefold estimate: --skew {args.skew} is below the mean, which is 1", file=sys.stderr)
        return 2
    parsed, findings = plan_from(args)
    if parsed.plan is None or errors(findings):
        return print_findings(findings, args.json)
    plan, wrong = on_measured_chip(parsed.plan, args.chip_file)
    if wrong:
        return print_findings(wrong, args.json)
    found = check(plan)
    if blockers(found):  # the estimate of an impossible plan misleads
        return print_findings(in_order([*findings, *found]), args.json)
    skew, problem = _skew(args, plan)
    if problem:
        print(f"threefold estimate: {problem}", file=sys.stderr)
        return 2
    guess, ledger = estimate(plan, skew=skew), traffic(plan, skew)
    overfull = [finding for finding in found if finding.rule in PREDICTED]
    if args.json:
        extra = {"findings": [f.to_json() for f in overfull], "traffic": [entry.to_json() for entry in ledger]}
        json.dump({**guess.to_json(), **extra}, sys.stdout, indent=2)
        print()
    else:
        print(estimate_text(plan, guess, ledger, overfull))
    return 1 if errors(overfull) else 0


def _skew(args: argparse.Namespace, plan: Plan) -> tuple[float, str]:
    """The busiest expert rank over the mean: as given, or from how tokens fell on the experts."""
    if not args.loads:
        return args.skew, skew_problem(args.skew, plan.layout.ep)
    if args.skew != 1:
        return 1.0, "--skew and --loads both say how tokens fall on the experts: give one"
    shares, problem = shares_from(args.loads, plan.model.num_experts)
    return (1.0, problem) if problem else (expert_skew(list(shares), plan.layout.ep), "")
