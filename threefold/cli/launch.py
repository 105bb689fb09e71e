"""`threefold launch`: what starts a plan on a cluster, printed or written."""

import argparse
import json
import sys
from pathlib import Path

from threefold.cli.command_line.inputs import add_plan_arguments, plan_from, print_findings
from threefold.cli.command_line.out import UsageError, is_written, print_json
from threefold.findings import in_order
from threefold.interop.megatron.bridge_files import inexpressible_text, job_script, torchrun_script
from threefold.interop.megatron.export_plan import export_plan
from threefold.launch.slurm import Options, batch_script, faults, torchrun_commands, tuning_script
from threefold.rules.all import check, errors, promoted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", action="store_true", help="a batch script for sbatch; nodes follow from the plan")
    kind.add_argument("--torchrun", action="store_true", help="the command to run on each node")
    parser.add_argument("--time", help="time limit of the job, such as 24:00:00")
    parser.add_argument("--partition", help="where the job waits")
    parser.add_argument("--account", help="who pays")
    parser.add_argument("--container", metavar="IMAGE", help="image to run in (Slurm with pyxis)")
    parser.add_argument("--run", help="the run's folder, on a file system that all nodes see")
    parser.add_argument("--profile", action="store_true", help="trace some steps, with Nsight Systems")
    parser.add_argument("--tune", metavar="BUDGET", help="a script that tunes the plan for that long, such as 60m")
    parser.add_argument("--max-restarts", type=int, default=3, metavar="N", help="starts after failures (default 3)")
    parser.add_argument(
        "--notice", type=int, default=300, metavar="SECONDS", help="to save before the time limit (default 300)"
    )
    parser.add_argument(
        "--fault-tolerance", action="store_true", help="with --slurm: under NVIDIA's ft_launcher (Megatron Bridge)"
    )
    parser.add_argument("--out", type=Path, help="write it here instead of printing it")


def run(args: argparse.Namespace) -> int:
    if args.tune is not None and (not args.slurm or args.profile):
        raise UsageError("--tune goes with --slurm, and without --profile")
    if args.max_restarts < 0 or args.notice < 1:
        raise UsageError("--max-restarts is 0 or more, --notice 1 or more")
    parsed, findings = plan_from(args)
    plan = parsed.plan
    beside = sys.stderr if args.out is None else None  # a file that the script goes to would hide findings
    if plan is None:
        return print_findings(findings, args.json, beside)
    options = Options(
        time=args.time,
        partition=args.partition,
        account=args.account,
        container=args.container,
        max_restarts=args.max_restarts,
        notice_seconds=args.notice,
        run=args.run,
        nsys=args.profile,
        tune=args.tune,
        fault_tolerant=args.fault_tolerance,
    )
    is_ours = plan.target == "threefold"
    judged = check(plan, notes=False)
    blocking = [*errors(promoted(judged) if is_ours else judged), *faults(plan, options)]
    if blocking:
        return print_findings(in_order(blocking), args.json, beside)
    if is_ours and "job.data" not in plan.stated:
        print(
            "note: the plan names no job.data: the job trains on the embedded corpus of Python sources", file=sys.stderr
        )
    if args.fault_tolerance and (is_ours or not args.slurm):
        raise UsageError("--fault-tolerance goes with --slurm and --target megatron-bridge")
    words = [args.plan, *args.overrides, *(["--target", args.target] if args.target else [])]
    if not is_ours and args.tune is not None:
        raise UsageError("--tune measures our own engine: give --target threefold")
    if not is_ours:
        export = export_plan(plan)
        text = job_script(export, args.plan, options) if args.slurm else torchrun_script(export)
        print(inexpressible_text(export), end="", file=sys.stderr)
    elif args.tune is not None:
        text = tuning_script(plan, words, options)
    else:
        text = batch_script(plan, words, options) if args.slurm else torchrun_commands(plan, words, options)
    if args.out is None:
        print(json.dumps({"ok": True, "script": text}, indent=2) if args.json else text, end="\n" if args.json else "")
        return 0
    if not is_written("launch", args.out, lambda: args.out.write_text(text, encoding="utf-8")):
        return 1
    if args.json:
        print_json({"ok": True, "script": text, "out": str(args.out)})
    else:
        print(f"wrote {args.out}: sbatch {args.out}" if args.slurm else f"wrote {args.out}")
    return 0
