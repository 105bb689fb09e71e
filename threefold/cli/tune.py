"""`threefold tune`: measure changes of a plan one variable at a time, and keep what is certainly faster."""

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from threefold.api.plans import for_our_engine
from threefold.cli.command_line.inputs import add_plan_arguments, duration, missing_package, plan_from, print_findings
from threefold.cli.command_line.sigterm import end_on_sigterm
from threefold.compare.contract import PRECISION_FIELDS
from threefold.findings import Finding, FindingsError, did_you_mean, in_order
from threefold.interop.megatron.export_plan import BRIDGE
from threefold.launch.slurm import Options
from threefold.machine.inventory import this_machine
from threefold.machine.own_chip_file import priced_here
from threefold.plan.file import parse_overrides
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.report.tune import ledger_text, tuned_text
from threefold.rules.all import check, errors, promoted
from threefold.tune.contract import ALL_RANKS, check_same_contract, contract_of, is_changeable
from threefold.tune.ledger import open_ledger
from threefold.tune.log_measurer import LogMeasurer
from threefold.tune.loop import Settings, Tuned, tune
from threefold.tune.measurement import AwaitingLogs, Measurer
from threefold.tune.recalibrate import measured_plans, recalibrate
from threefold.tune.result import tuned_json, write_card, write_winner
from threefold.units import format_many

AWAITING = 3  # exit code: jobs were written, and their logs are not there yet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, optional=True)
    parser.add_argument("--budget", type=duration, default=480.0, metavar="TIME", help="such as 90s or 8m (8m)")
    parser.add_argument("--trials", type=_count, metavar="N", help="changes to try at most (default: as time allows)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the tuning; the same command goes on in it")
    parser.add_argument("--seed", type=_seed, metavar="N", help="of initialisation and data (default: the plan's)")
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
        "--rank", type=_seed, metavar="N", help="run this rank alone, with rehearsed peers, for a layout of many ranks"
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
            print("threefold tune: give a plan, or --show DIR", file=sys.stderr)
            return 2
        with end_on_sigterm():
            return _run(args)
    except AwaitingLogs as waiting:
        if args.json:
            told = {"verdict": "awaiting logs", "jobs": waiting.count, "run": waiting.script}
            json.dump({**told, "is_under_way": waiting.is_under_way}, sys.stdout, indent=2)
            print()
        elif waiting.is_under_way:
            print(f"The log of {waiting.script} ends before its last step: its job is under way, or was killed.")
            print("Give the same command again when it has ended; submit it again if it was killed.")
        else:
            print(f"{format_many(waiting.count, 'job')} written. Run: bash {shlex.quote(waiting.script)}")
            print("Then give the same command again: it reads the logs and goes on.")
        return AWAITING
    except ModuleNotFoundError as error:
        return missing_package("tune", error)
    except FindingsError as error:
        return print_findings(in_order(error.findings), args.json)
    except KeyboardInterrupt:
        print("\nthreefold tune: interrupted; the same command goes on with the trials that are done", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    parsed, findings = plan_from(args)
    if parsed.plan is None:
        return print_findings(findings, args.json)
    is_foreign = parsed.plan.target == BRIDGE
    given = parsed.plan if is_foreign else for_our_engine(parsed.plan)
    plan = priced_here(given if args.seed is None else change(given, {"job.seed": args.seed}))
    if blocking := errors(promoted(check(plan, notes=False))):
        return print_findings(in_order(blocking), args.json)
    if is_foreign and (args.rank is not None or args.launcher):
        print("threefold tune: --rank and --launcher are for the threefold engine", file=sys.stderr)
        return 2
    ranks = ALL_RANKS if is_foreign else _ranks(plan, args.rank, args.launcher)
    extra, problems = _tries(args.tries)
    if problems:
        return print_findings(in_order(problems), args.json)
    here = None if is_foreign else this_machine(try_kernels=False)
    problems = [finding for path in args.keep for finding in _unknown(path)]
    if problems:
        return print_findings(in_order(problems), args.json)
    budget = math.inf if is_foreign else args.budget  # of a job nobody here takes the time
    kept = frozenset(args.keep) | (frozenset() if args.formats else frozenset(PRECISION_FIELDS))
    settings = Settings(budget, args.trials, extra, kept)
    folder = args.out or Path("runs") / f"tune-{Path(args.plan).stem}-{plan.hash}"
    _say(f"trials are kept in {folder}")
    with open_ledger(folder) as ledger:
        contract = contract_of(plan, here, settings.screen, settings.confirm, plan.job.seed, ranks)
        before = ledger.contract
        if before is None:
            ledger.set_fact("contract", contract)
        else:
            check_same_contract(before, json.loads(json.dumps(contract)), str(folder))
        measurer = _measurer(args, folder, is_foreign)
        try:
            found = tune(plan, contract, ledger, measurer, settings, _say)
        finally:
            measurer.close()
        write_winner(found, folder)
        if not is_foreign:  # nobody here can measure it again
            write_card(found, folder, _command(args))
        _tell(found, folder, args.json)
        if args.rank is None and not is_foreign and ledger.fact("calibrated") != len(found.trials):
            if said := recalibrate(plan.cluster.chip, measured_plans(ledger)):
                _say(said)
            ledger.set_fact("calibrated", len(found.trials))
    return 0


def _measurer(args: argparse.Namespace, folder: Path, is_foreign: bool) -> Measurer:
    if is_foreign:
        return LogMeasurer(folder, args.plan, Options(time=args.time, partition=args.partition, account=args.account))
    from threefold.tune.engine_measurer import EngineMeasurer

    return EngineMeasurer(folder / "processes", args.rank, shlex.split(args.launcher))


def _tell(found: Tuned, folder: Path, as_json: bool) -> None:
    result = tuned_json(found, folder)
    if as_json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        print(tuned_text(result))


def _show(folder: Path, as_json: bool) -> int:
    with open_ledger(folder, create=False) as ledger:
        contract, verdicts = ledger.contract, ledger.verdicts()
        trials = [row.to_json() for row in ledger.trials()]
    if as_json:
        json.dump({"contract": contract, "verdicts": verdicts, "trials": trials}, sys.stdout, indent=2)
        print()
    else:
        print(ledger_text(contract, verdicts, trials))
    return 0


def _command(args: argparse.Namespace) -> list[str]:
    """The command line of this tuning, without its output and its own changes."""
    words = ["threefold", "tune", args.plan, *args.overrides, "--budget", f"{args.budget:g}s"]
    words += ["--target", args.target] if args.target else []
    words += ["--seed", str(args.seed)] if args.seed is not None else []
    words += ["--formats"] if args.formats else []
    words += ["--rank", str(args.rank)] if args.rank is not None else []
    return words + (["--launcher", args.launcher] if args.launcher else [])


def _ranks(plan: Plan, rank: int | None, launcher: str) -> str:
    """Which ranks run, in the words of the contract. Each needs a device."""
    from threefold.engine.dist.join import check_ranks_start_here

    if rank is not None:
        if rank >= plan.cluster.gpus:
            problem = f"rank {rank} is not among {format_many(plan.cluster.gpus, 'rank')}"
            raise FindingsError(
                [Finding(rule="ranks-start-here", at="--rank", problem=problem, advice="choose another")]
            )
        return f"rank {rank} of {plan.cluster.gpus} with rehearsed peers"
    if not launcher:
        advice = "run one rank with rehearsed peers (--rank 0), or all on a cluster (--launcher srun, threefold launch)"
        check_ranks_start_here(plan, advice)
    return ALL_RANKS


def _tries(words: list[str]) -> tuple[tuple[dict[str, Any], ...], list[Finding]]:
    """Each --try is one change: `path=value`, or several separated by blanks."""
    found, problems = [], []
    for word in words:
        changes, more = parse_overrides(word.split())
        found.append(changes)
        problems += more
    return tuple(found), problems


def _unknown(path: str) -> list[Finding]:
    """A finding where no trial changes the field, so that a misspelt one does not go unseen."""
    changeable = [name for name in FIELDS if is_changeable(name)]
    if path in changeable:
        return []
    advice = did_you_mean(path, changeable) or "name a field of layout, knobs or run, or job.micro_batch"
    return [Finding(rule="unknown-field", at="--keep", problem=f"{path} is no field that trials change", advice=advice)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100000")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value
