"""`threefold import-hf`: a Hugging Face checkpoint becomes the start of a run."""

import argparse
from pathlib import Path

from threefold.cli.inputs import missing_package, print_findings
from threefold.findings import FindingsError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="config.json with safetensors beside it")
    parser.add_argument("--out", type=Path, required=True, help="the run folder to make")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="dtype to keep the weights in")


def run(args: argparse.Namespace) -> int:
    try:
        from threefold.engine.weights.convert import import_hf
    except ModuleNotFoundError as error:
        return missing_package("import-hf", error)
    try:
        for line in import_hf(args.folder, args.out, args.dtype):
            print(line)
    except FindingsError as error:
        return print_findings(error.findings, as_json=False)
    return 0
