"""`threefold import-hf`: a Hugging Face checkpoint becomes the start of a run."""

import argparse
from pathlib import Path

from threefold.cli.command_line.inputs import add_json
from threefold.cli.command_line.out import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="config.json with safetensors beside it")
    parser.add_argument("--out", type=Path, required=True, help="the run folder to make")
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="dtype to keep the weights in (default auto: the one that loses nothing of the checkpoint)",
    )
    parser.add_argument("--adapter", type=Path, metavar="PEFT", help="a folder of PEFT: LoRA adapters to go on from")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from threefold.engine.weights.convert import import_hf
    from threefold.engine.weights.run_files import DRAFT

    lines = []
    for line in import_hf(args.folder, args.out, args.dtype, args.adapter):
        lines.append(line)
        if not args.json:
            print(line, flush=True)
    how = f"threefold train {args.out / DRAFT} --run {args.out} job.data=FILE.jsonl job.task=sft"
    if args.json:
        print_json({"ok": True, "out": str(args.out), "done": lines, "next": how})
    else:
        print(f"train from them with data of your own: {how}")
    return 0
