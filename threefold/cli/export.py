"""`threefold export`: a plan as Megatron Bridge or Megatron-LM takes it, printed or written to a folder."""

import argparse
import json
import sys
from pathlib import Path

from threefold.cli.command_line.inputs import add_plan_arguments, plan_from, print_findings
from threefold.findings import in_order, shown
from threefold.interop.megatron.bridge_files import export_files
from threefold.interop.megatron.export_plan import BRIDGE, FORMATS, export_plan
from threefold.interop.slurm import Options, faults
from threefold.plan.parse import change
from threefold.rules.all import check, errors
from threefold.spec.megatron import is_release_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument("--to", choices=FORMATS, default=BRIDGE, help="what will run it (default megatron-bridge)")
    parser.add_argument(
        "--release", help="NeMo container or Bridge version whose names to use (default: stack.release, or the newest)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the files here instead of printing them")
    parser.add_argument("--time", help="time limit of the Slurm job, such as 24:00:00")
    parser.add_argument("--partition", help="where the Slurm job waits")
    parser.add_argument("--account", help="who pays for it")
    parser.add_argument("--container", metavar="IMAGE", help="image that it runs in (Slurm with pyxis)")


def run(args: argparse.Namespace) -> int:
    if args.release is not None and not is_release_name(args.release):
        advice = "give a NeMo container such as 26.06, or a version of Megatron Bridge such as 0.5"
        print(f"threefold export: --release {shown(args.release)} is no release: {advice}", file=sys.stderr)
        return 2
    parsed, findings = plan_from(args)
    beside = None if args.out or args.json else sys.stderr
    if parsed.plan is None:
        return print_findings(findings, args.json, beside)
    plan = parsed.plan
    options = Options(time=args.time, partition=args.partition, account=args.account, container=args.container)
    judged = plan if plan.target == BRIDGE else change(plan, {"target": BRIDGE})
    blocking = [*errors(check(judged, notes=False)), *faults(plan, options)]
    if blocking:
        return print_findings(in_order(blocking), args.json, beside)
    export = export_plan(plan, args.to, args.release)
    files = export_files(export, args.plan, options, str(args.out or "."))
    if args.json:
        json.dump({**export.to_json(), "files": files}, sys.stdout, indent=2)
        print()
    if args.out is None:
        if not args.json:
            print("\n".join(f"==> {name} <==\n{text}" for name, text in files.items()), end="")
        return 0
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (args.out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"threefold export: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if not args.json:
        print(f"wrote {', '.join(files)} to {args.out}")
        print(files["table.txt"], end="")
    return 0
