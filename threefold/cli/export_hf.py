"""`threefold export-hf`: the newest checkpoint of a run as a folder that transformers loads."""

import argparse
import json
from pathlib import Path

from threefold.cli.command_line.inputs import add_json, add_newest, missing_package, print_findings
from threefold.findings import FindingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--adapter", action="store_true", help="only the LoRA adapters, for PEFT (default: merged into the weights)"
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="with --adapter: their base checkpoint (default: the one imported)",
    )
    add_newest(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    try:
        from threefold.engine.weights.convert import export_hf
    except ModuleNotFoundError as error:
        return missing_package("export-hf", error)
    try:
        lines = []
        for line in export_hf(args.run, args.out, args.adapter, args.base, args.newest):
            lines.append(line)
            if not args.json:
                print(line, flush=True)
    except FindingsError as error:
        return print_findings(error.findings, args.json)
    if args.json:
        print(json.dumps({"ok": True, "out": str(args.out), "done": lines}, indent=2))
    return 0
