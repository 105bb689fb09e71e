"""`threefold sample`: let the newest checkpoint of a run continue a prompt."""

import argparse
import math
import sys
from pathlib import Path

from threefold.cli.inputs import missing_package, print_findings
from threefold.findings import FindingsError

SEEDS = 2**63  # that torch takes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="how many to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the draws at a temperature (default 0)")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), or a Hugging Face tokenizer file")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.temperature < math.inf or abs(args.seed) >= SEEDS or args.tokens < 0:
        print("threefold sample: --temperature and --tokens are 0 or more, --seed is of 63 bits", file=sys.stderr)
        return 2
    try:
        from threefold.engine.data.text.tokenizer import open_tokenizer
        from threefold.engine.sample import sample_text
        from threefold.engine.train_state import load_run
    except ModuleNotFoundError as error:
        return missing_package("sample", error)
    try:
        model = load_run(args.run, lambda text: print(text, file=sys.stderr))
        text = sample_text(model, open_tokenizer(args.tokenizer), args.prompt, args.tokens, args.temperature, args.seed)
    except FindingsError as error:
        return print_findings(error.findings, as_json=False)
    print(args.prompt + text)
    return 0
