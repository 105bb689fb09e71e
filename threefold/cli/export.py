"""`threefold export`: a plan as Megatron Bridge or Megatron-LM takes it, printed or written to a folder."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from threefold.api.exports import export
from threefold.cli.command_line.inputs import add_plan_arguments, plan_from, print_findings
from threefold.cli.command_line.out import UsageError, print_json
from threefold.findings import FindingsError, shown
from threefold.interop.megatron.bridge_files import export_files
from threefold.interop.megatron.export_plan import BRIDGE, FORMATS, LM, Export
from threefold.interop.megatron.judge.verdict import EXIT_CODES, summary_text
from threefold.interop.megatron.validation import run_validation
from threefold.launch.slurm import Options
from threefold.spec.megatron import is_release_name

NOT_VERIFIED = "not verified: run its validate.py where Megatron is installed, or export with --verify\n"
# A part of an export, with the file that has it by target, and its keys in the JSON.
ONLY = {
    "overrides": ({BRIDGE: "overrides.txt", LM: "arguments.sh"}, ("overrides", "arguments")),
    "environment": (dict.fromkeys((BRIDGE, LM), "environment.sh"), ("environment",)),
    "table": (dict.fromkeys((BRIDGE, LM), "table.txt"), ("inexpressible",)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument("--to", choices=FORMATS, default=BRIDGE, help="what will run it (default megatron-bridge)")
    parser.add_argument(
        "--release", help="NeMo container or Bridge version whose names to use (default: stack.release, or the newest)"
    )
    parser.add_argument(
        "--only",
        choices=ONLY,
        help="print only this part: the settings, the environment, or what Megatron cannot express",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the files here instead of printing them")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="let Megatron's own validation judge the export, on a CPU; exit with 3 where it cannot",
    )
    parser.add_argument("--python", metavar="FILE", help="interpreter that has Megatron's packages (default: this one)")
    parser.add_argument(
        "--megatron", type=Path, metavar="DIR", help="unpacked wheels of Megatron (default: as installed there)"
    )
    parser.add_argument(
        "--verify-seconds", type=float, default=120.0, metavar="S", help="its limit of time (default 120)"
    )
    parser.add_argument("--time", help="time limit of the Slurm job, such as 24:00:00")
    parser.add_argument("--partition", help="where the Slurm job waits")
    parser.add_argument("--account", help="who pays for it")
    parser.add_argument("--container", metavar="IMAGE", help="image that it runs in (Slurm with pyxis)")
    parser.add_argument(
        "--fault-tolerance", action="store_true", help="start it under NVIDIA's ft_launcher (Megatron Bridge)"
    )


def run(args: argparse.Namespace) -> int:
    if args.release is not None and not is_release_name(args.release):
        advice = "give a NeMo container such as 26.06, or a version of Megatron Bridge such as 0.5"
        raise UsageError(f"--release {shown(args.release)} is no release: {advice}")
    parsed, findings = plan_from(args)
    beside = None if args.out or args.json else sys.stderr
    if parsed.plan is None:
        return print_findings(findings, args.json, beside)
    plan = parsed.plan
    if args.fault_tolerance and args.to != BRIDGE:
        raise UsageError(f"--fault-tolerance goes with --to {BRIDGE}")
    options = Options(
        time=args.time,
        partition=args.partition,
        account=args.account,
        container=args.container,
        fault_tolerant=args.fault_tolerance,
    )
    try:
        exported = export(plan, args.to, args.release, options)
    except FindingsError as error:
        return print_findings(error.findings, args.json, beside)
    files = export_files(exported, args.plan, options, str(args.out or "."))
    if args.out is not None and not _write(files, args.out):
        return 1
    answer = _verify(args, exported, files) if args.verify else None
    if args.json:
        said = {**exported.to_json(), "files": files, "verification": answer}
        said = {key: said[key] for key in ("to", "bridge", "core", *ONLY[args.only][1])} if args.only else said
        print_json(said)
    elif args.only:
        print(files[ONLY[args.only][0][args.to]], end="")
    elif args.out is None:
        print("\n".join(f"==> {name} <==\n{text}" for name, text in files.items()))
    else:
        print(f"wrote {', '.join(files)} to {args.out}")
        print(files["table.txt"], end="")
    if not args.json and not args.only:
        print(summary_text(answer) if answer else NOT_VERIFIED, end="")
    return EXIT_CODES[answer["verdict"]] if answer else 0


def _write(files: dict[str, str], folder: Path) -> bool:
    """Whether every file could be written; a message says what could not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"threefold export: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _verify(args: argparse.Namespace, export: Export, files: dict[str, str]) -> dict[str, Any]:
    """Megatron's verdict on the written files, which are in a folder of their own where they are only printed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        if args.out is None:
            _write(files, folder)
        return run_validation(export.stack, folder, args.python, args.megatron, args.verify_seconds)
