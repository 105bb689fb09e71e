"""`threefold fit`: does a model fit, and from how many GPUs on."""

import argparse

from threefold.api.searches import fit
from threefold.cli.command_line.inputs import add_chip_file, print_findings
from threefold.cli.command_line.out import print_json
from threefold.findings import in_order
from threefold.plan.file import parse_overrides
from threefold.plan.parse import normalize
from threefold.report.search import fit_text, verdict_text
from threefold.rules.all import errors
from threefold.spec.stacks import TARGETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model name, or hf:path of a config.json")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="fields of the plan that are fixed")
    parser.add_argument("--chip", metavar="C", default="h100", help="a chip name (default h100)")
    add_chip_file(parser)
    parser.add_argument("--gpus", metavar="N,N,...", type=_sizes, default=[], help="these numbers of GPUs only")
    parser.add_argument("--seq-len", metavar="S", default="4096", help="tokens in a sequence (default 4096)")
    parser.add_argument("--target", choices=TARGETS, help="the stack that runs it (default: as in plan)")
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def run(args: argparse.Namespace) -> int:
    length = int(args.seq_len) if args.seq_len.isdecimal() else args.seq_len
    flags = {"model": args.model, "cluster.chip": args.chip, "job.seq_len": length, "target": args.target}
    given, wrong = parse_overrides(args.overrides)
    fields, findings = normalize({path: value for path, value in {**flags, **given}.items() if value is not None})
    if errors([*wrong, *findings]):
        return print_findings(in_order([*wrong, *findings]), args.json)
    points = fit(fields, args.gpus, args.chip_file)
    if args.json:
        said = {"summary": [verdict_text(points)], "points": [point.to_json() for point in points]}
        print_json(said)
    else:
        print(fit_text(points))
    return 0 if any(point.fits for point in points) else 1


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if not sizes or min(sizes) < 1:
        raise ValueError(text)
    return sizes
