"""`threefold export-hf`: the newest checkpoint of a run as a folder that transformers loads."""

import argparse
from pathlib import Path

from threefold.cli.command_line.inputs import add_json, add_newest
from threefold.cli.command_line.out import print_json


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
    from threefold.engine.weights.convert import export_hf

    lines = []
    for line in export_hf(args.run, args.out, args.adapter, args.base, args.newest):
        lines.append(line)
        if not args.json:
            print(line, flush=True)
    if args.json:
        print_json({"ok": True, "out": str(args.out), "done": lines})
    return 0
