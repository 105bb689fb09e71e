"""`threefold train`: run a plan, or go on with the run in its folder."""

import argparse
import sys
from pathlib import Path

from threefold.cli.inputs import add_plan_arguments, missing_package, plan_from, print_findings
from threefold.findings import FindingsError, in_order
from threefold.rules.all import check, promoted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument("--run", type=Path, help="the run's folder (default: runs/PLAN-HASH)")
    parser.add_argument("--threads", type=int, help="CPU threads to compute with (default: all)")


def run(args: argparse.Namespace) -> int:
    if args.threads is not None and args.threads < 1:
        print(f"threefold train: --threads {args.threads} is below 1", file=sys.stderr)
        return 2
    parsed, findings = plan_from(args)
    plan = parsed.plan
    if plan is None:
        return print_findings(findings, args.json)
    blocking = [finding for finding in promoted(check(plan)) if finding.severity == "error"]
    if blocking:
        return print_findings(in_order(blocking), args.json)
    try:
        from threefold.engine.train import train
    except ModuleNotFoundError as error:
        return missing_package("train", error)
    folder = args.run or Path("runs") / f"{Path(args.plan).stem}-{plan.hash}"
    try:
        trainer = train(plan, folder, threads=args.threads)
    except FindingsError as error:
        return print_findings(error.findings, args.json)
    done = trainer.step >= plan.job.steps
    print(f"{'finished' if done else 'stopped'} at step {trainer.step} of {plan.job.steps}: {folder}")
    return 0
