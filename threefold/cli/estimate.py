"""`threefold estimate`: what a plan needs and reaches, predicted."""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threefold.api.plans import MOST_TOKENS, judged_estimate, on_measured_chip, training_curve
from threefold.api.rehearsals import shares_from, skew_problem
from threefold.cli.command_line.inputs import add_chip_file, add_like, add_plan_arguments, plan_from, print_findings
from threefold.cli.command_line.out import UsageError, is_written, print_json
from threefold.cost.anchor import anchored
from threefold.cost.layer_work import expert_skew
from threefold.cost.traffic.by_stack import traffic
from threefold.cost.training_run.training_run import TrainingRun, training_run
from threefold.diagnose.snapshots.predicted import changes_of_terms, snapshot_of
from threefold.fields import MAX_RANKS
from threefold.findings import Finding, FindingsError, did_you_mean, in_order
from threefold.machine.own_chip_file import NO_CHIP_FILE
from threefold.plan.plan import Plan
from threefold.report.estimate import (
    estimate_summary,
    estimate_text,
    point_json,
    training_summary,
    training_text,
    usual_sizes,
)
from threefold.rules.all import advice, errors
from threefold.spec.chip_description import OPERATIONS, problem_with

MOST_JITTER = 0.5
_MOST_SIZES = 200  # of a curve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    add_chip_file(parser)
    parser.add_argument(
        "--skew", type=float, metavar="X", help="load of the busiest expert rank over the mean (default: by job.load)"
    )
    parser.add_argument(
        "--loads",
        metavar="FILE",
        help="the skew, from tokens of each expert: a JSON list, one a layer, or the folder of a run",
    )
    add_like(parser)
    parser.add_argument(
        "--tokens", type=_tokens, metavar="N", help="what a training of so many tokens takes, such as 1.5T or 500B"
    )
    parser.add_argument("--price", type=_price, metavar="P", help="with --tokens: the price of a GPU-hour")
    parser.add_argument(
        "--sizes", type=_sizes, metavar="N,N,...", help="with --tokens: also on clusters of other sizes, or auto"
    )
    parser.add_argument(
        "--jitter",
        type=float,
        metavar="X",
        help="also simulate steps in which each pass of a rank deviates by X, such as 0.02",
    )
    parser.add_argument(
        "--snapshot", metavar="FILE", help="write the largest stage's memory for PyTorch's memory viewer (.pickle)"
    )
    parser.add_argument(
        "--assume",
        action=_Assume,
        default={},
        metavar="NAME=VALUE",
        help="with --tokens: another figure about the cluster, such as gpu_mtbf_hours=20000 (repeat it for more)",
    )


def run(args: argparse.Namespace) -> int:
    if problem := _argument_problem(args):
        raise UsageError(problem)
    parsed, findings = plan_from(args)
    if parsed.plan is None or errors(findings):
        return print_findings(findings, args.json)
    try:
        plan = on_measured_chip(parsed.plan, args.chip_file)
        skew, problem = _skew(args, plan)
        if problem:
            raise UsageError(problem)
        guess, overfull = judged_estimate(plan, skew)
        if args.like:
            from threefold.api.anchors import read_anchor  # reads runs with numpy, which other estimates do without

            guess = anchored(guess, plan, read_anchor(args.like, plan.target))
    except FindingsError as error:
        return print_findings(in_order([*findings, *error.findings]), args.json)
    if args.tokens is not None:
        return _tell_training(args, plan, training_run(plan, guess, args.tokens, args.price, args.assume), overfull)
    ledger = traffic(plan, skew)
    content = snapshot_of(changes_of_terms(guess.memory.worst.terms)) if args.snapshot else b""
    if args.snapshot and not is_written("estimate", args.snapshot, lambda: Path(args.snapshot).write_bytes(content)):
        return 1
    simulated = None
    if args.jitter is not None:
        from threefold.cost.time.simulation import simulate_step  # numpy, which other estimates do without

        try:
            simulated = simulate_step(plan, args.jitter)
        except ValueError as error:
            raise UsageError(f"--jitter: {error}") from None
    if args.json:
        extra: dict[str, Any] = {
            "findings": [f.to_json() for f in overfull],
            "traffic": [entry.to_json() for entry in ledger],
        }
        extra |= {"advice": [piece.to_json() for piece in advice(plan)]}
        extra |= {"simulated": simulated.to_json()} if simulated else {}
        said = {"summary": estimate_summary(plan, guess, overfull), **guess.to_json(), **extra}
        print_json(said)
    else:
        print(estimate_text(plan, guess, ledger, overfull, advice(plan)))
        if simulated:
            from threefold.report.estimate import simulation_text

            print(f"\n{simulation_text(simulated, args.jitter)}")
    return 1 if errors(overfull) else 0


def _argument_problem(args: argparse.Namespace) -> str:
    if args.skew is not None and not (math.isfinite(args.skew) and args.skew >= 1):
        return f"--skew {args.skew} is below the mean, which is 1"
    if args.tokens is None and (args.price is not None or args.sizes is not None or args.assume):
        return "--price, --sizes and --assume are about a whole training: give --tokens"
    if args.jitter is not None and not 0 <= args.jitter <= MOST_JITTER:
        return f"--jitter {args.jitter} is no deviation of a pass, which is 0 to {MOST_JITTER}"
    return ""


def _tell_training(args: argparse.Namespace, plan: Plan, found: TrainingRun, overfull: Sequence[Finding]) -> int:
    """What the whole training takes, and the same on clusters of other sizes."""
    curve = []
    if args.sizes is not None:
        sizes = args.sizes or usual_sizes(plan)
        curve = training_curve(plan, args.tokens, sizes, args.price, args.assume, NO_CHIP_FILE)
    if args.json:
        said = {"summary": training_summary(plan, found), **found.to_json()}
        said |= {"findings": [one.to_json() for one in overfull]}
        said |= {"curve": [point_json(*pair) for pair in curve]} if curve else {}
        print_json(said)
    else:
        print(training_text(plan, found, curve))
        print("".join(f"\n{one}" for one in overfull), end="\n" if overfull else "")
    return 1 if errors(overfull) else 0


def _tokens(text: str) -> float:
    """1.5T, 500B, 10M or a plain number."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    value = _number(text[:-1]) * scale if scale else _number(text)
    if not 1 <= value <= MOST_TOKENS:  # false of NaN
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens, such as 1.5T")
    return value


def _number(text: str) -> float:
    """The number that a text is; NaN, which every range refuses, where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _price(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} is no price of a GPU-hour, such as 2.5")
    return value


def _sizes(text: str) -> list[int]:
    """Numbers of GPUs, or none for `auto`."""
    if text == "auto":
        return []
    parts = text.split(",")
    sizes = [int(part) if re.fullmatch(r"\s*[0-9]{1,9}\s*", part) else 0 for part in parts]
    if not all(1 <= size <= MAX_RANKS for size in sizes) or len(sizes) > _MOST_SIZES:
        raise argparse.ArgumentTypeError(f"{text} are no numbers of GPUs, such as 256,512,1024")
    return sizes


class _Assume(argparse.Action):
    """Collects name=value into a mapping."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = dict(getattr(namespace, self.dest) or {})
        name, _, text = str(values).partition("=")
        try:
            given[name] = float(text)
        except ValueError:
            parser.error(f"--assume {values}: write name=number, such as gpu_mtbf_hours=20000")
        if problem := problem_with(name, given[name]):
            advice = OPERATIONS[name].doc if name in OPERATIONS else did_you_mean(name, OPERATIONS)
            parser.error(f"--assume {values}: {problem} ({advice})")
        setattr(namespace, self.dest, given)


def _skew(args: argparse.Namespace, plan: Plan) -> tuple[float | None, str]:
    """The busiest expert rank over the mean: as given, or from how tokens fell on the experts; None where neither
    is."""
    if not args.loads:
        return args.skew, "" if args.skew is None else skew_problem(args.skew, plan.layout.ep)
    if args.skew is not None:
        return 1.0, "--skew and --loads both say how tokens fall on the experts: give one"
    shares, problem = shares_from(args.loads, plan.model.num_experts)
    return (1.0, problem) if problem else (expert_skew(list(shares), plan.layout.ep), "")
