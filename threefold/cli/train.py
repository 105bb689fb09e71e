"""`threefold train`: run a plan, or go on with the run in its folder."""

import argparse
import sys
from pathlib import Path

from threefold.cli.inputs import add_plan_arguments, plan_from, print_findings
from threefold.findings import FindingsError, in_order
from threefold.rules.all import check, promoted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument("--run", type=Path, help="the run's folder (default: runs/PLAN-HASH)")
    parser.add_argument("--threads", type=int, help="CPU threads to compute with (default: all)")


def run(args: argparse.Namespace) -> int:
    parsed, findings = plan_from(args)
    plan = parsed.plan
    if plan is None:
        return print_findings(findings, args.json)
    blocking = [finding for finding in promoted(check(plan)) if finding.severity == "error"]
    if blocking:
        return print_findings(in_order(blocking), args.json)
    try:
        from threefold.engine.train import train
    except ImportError as error:
        print(f"threefold train: {error.name} is not installed: pip install 'threefold[train]'", file=sys.stderr)
        return 1
    folder = args.run or Path("runs") / f"{Path(args.plan).stem}-{plan.hash}"
    try:
        trainer = train(plan, folder, threads=args.threads)
    except FindingsError as error:
        return print_findings(error.findings, args.json)
    done = trainer.step >= plan.job.steps
    print(f"{'finished' if done else 'stopped'} at step {trainer.step} of {plan.job.steps}: {folder}")
    return 0
