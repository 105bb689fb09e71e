"""`threefold tune`: measure changes of a plan one variable at a time, and keep what is certainly faster."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from threefold.api.plans import for_our_engine
from threefold.api.tunings import read_tuning, tune_plan
from threefold.cli.command_line.inputs import add_plan_arguments, duration, say, the_plan, whole_number
from threefold.cli.command_line.out import UsageError, end_on_sigterm, print_json
from threefold.findings import Finding, FindingsError
from threefold.interop.megatron.export_plan import BRIDGE
from threefold.launch.slurm import Options
from threefold.plan.file import parse_overrides
from threefold.plan.parse import change
from threefold.report.tune import ledger_text, tuned_text
from threefold.tune.measurement import AwaitingLogs
from threefold.tune.result import tuned_json
from threefold.units import format_many

AWAITING = 3  # exit code: jobs were written, and their logs are not there yet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, optional=True)
    parser.add_argument("--budget", type=duration, default=480.0, metavar="TIME", help="such as 90s or 8m (8m)")
    parser.add_argument(
        "--trials", type=whole_number(0, 100_000), metavar="N", help="changes to try at most (default: as time allows)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the tuning; the same command goes on in it")
    parser.add_argument(
        "--seed", type=whole_number(0), metavar="N", help="of initialization and data (default: the plan's)"
    )
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="path=value", help="a change of your own to try too"
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="FIELD", help="a field to leave alone, such as knobs.precision"
    )
    parser.add_argument(
        "--formats", action="store_true", help="try other formats of numbers too: a winner is then a new experiment"
    )
    parser.add_argument(
        "--rank",
        type=whole_number(0),
        metavar="N",
        help="run this rank alone, with rehearsed peers, for a layout of many ranks",
    )
    parser.add_argument(
        "--launcher", default="", metavar="COMMAND", help="what starts one process a rank on a cluster, such as srun"
    )
    for flag, what in (("time", "time limit"), ("partition", "partition"), ("account", "account")):
        parser.add_argument(f"--{flag}", help=f"{what} of the Slurm jobs of a plan for Megatron Bridge")
    parser.add_argument("--show", type=Path, metavar="DIR", help="print the trials and verdicts of a tuning, and end")


def run(args: argparse.Namespace) -> int:
    try:
        if args.show is not None:
            return _show(args.show, args.json)
        if args.plan is None:
            raise UsageError("give a plan, or --show DIR")
        with end_on_sigterm():
            return _run(args)
    except AwaitingLogs as waiting:
        if args.json:
            told = {"verdict": "awaiting logs", "jobs": waiting.count, "run": waiting.script}
            print_json({**told, "is_under_way": waiting.is_under_way})
        elif waiting.is_under_way:
            print(f"The log of {waiting.script} ends before its last step: its job is under way, or was killed.")
            print("Give the same command again when it has ended; submit it again if it was killed.")
        else:
            print(f"{format_many(waiting.count, 'job')} written. Run: bash {shlex.quote(waiting.script)}")
            print("Then give the same command again: it reads the logs and goes on.")
        return AWAITING
    except KeyboardInterrupt:
        print("\nthreefold tune: interrupted; the same command goes on with the trials that are done", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    given = the_plan(args)
    is_foreign = given.target == BRIDGE
    if is_foreign and (args.rank is not None or args.launcher):
        raise UsageError("--rank and --launcher are for the threefold engine")
    plan = given if is_foreign else for_our_engine(given)
    plan = plan if args.seed is None else change(plan, {"job.seed": args.seed})
    tries, problems = _tries(args.tries)
    if problems:
        raise FindingsError(problems)
    folder = args.out or Path("runs") / f"tune-{Path(args.plan).stem}-{plan.hash}"
    found = tune_plan(
        plan, folder, args.budget, args.trials, tries, args.keep, args.formats, args.rank, shlex.split(args.launcher),
        Options(time=args.time, partition=args.partition, account=args.account), args.plan, _command(args), say,
    )  # fmt: skip
    _tell(tuned_json(found, folder), args.json, tuned_text)
    return 0


def _show(folder: Path, as_json: bool) -> int:
    _tell(read_tuning(folder), as_json, lambda found: ledger_text(**found))
    return 0


def _tell(found: dict[str, Any], as_json: bool, text: Callable[[dict[str, Any]], str]) -> None:
    if as_json:
        print_json(found)
    else:
        print(text(found))


def _command(args: argparse.Namespace) -> list[str]:
    """The command line of this tuning, without its output and its own changes."""
    words = ["threefold", "tune", args.plan, *args.overrides, "--budget", f"{args.budget:g}s"]
    words += ["--target", args.target] if args.target else []
    words += ["--seed", str(args.seed)] if args.seed is not None else []
    words += ["--formats"] if args.formats else []
    words += ["--rank", str(args.rank)] if args.rank is not None else []
    return words + (["--launcher", args.launcher] if args.launcher else [])


def _tries(words: list[str]) -> tuple[tuple[dict[str, Any], ...], list[Finding]]:
    """Each --try is one change: `path=value`, or several separated by blanks."""
    found, problems = [], []
    for word in words:
        changes, more = parse_overrides(word.split())
        found.append(changes)
        problems += more
    return tuple(found), problems
