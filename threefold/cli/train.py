"""`threefold train`: run a plan, go on with a run, or start one from another; start its ranks, or be one of them."""

import argparse
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from threefold.api.trainings import health_of_run, plan_on_ranks, start_ranks, train_rank, training_errors
from threefold.cli.command_line.inputs import (
    add_plan_arguments,
    add_rope_scaling,
    missing_package,
    plan_from,
    print_findings,
    refuse_too_small,
)
from threefold.cli.command_line.out import UsageError
from threefold.engine.weights.run_files import write_longer_config
from threefold.findings import Finding, FindingsError
from threefold.launch.cpu_cores import sleep_while_waiting
from threefold.launch.output import write_and_flush
from threefold.launch.rank_process import FAULT, LOST_PEER, REFUSED
from threefold.launch.stop_signals import SIGNAL_CODE, stop_message
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.plan.ranks import RankEnvironment, rank_environment
from threefold.units import format_many

_INTERRUPTED = SIGNAL_CODE + signal.SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument("--run", type=Path, help="the run's folder (default: runs/PLAN-HASH)")
    parser.add_argument(
        "--threads", type=int, help="CPU threads of a rank (default: the cores over the ranks, fewer for small models)"
    )
    parser.add_argument(
        "--stop-at", type=int, metavar="STEP", help="save and stop after this step; the same command continues later"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="trace three steps after the first ones into the run's profile folder; of a short run the last",
    )
    parser.add_argument(
        "--profile-with",
        choices=("torch", "nsys"),
        default="torch",
        help="who traces: torch's profiler, or Nsight Systems, under which the command was started",
    )
    parser.add_argument(
        "--from",
        dest="origin",
        type=Path,
        metavar="RUN",
        help="start a new run from the weights of this run's newest checkpoint, whatever its layout, length or data",
    )
    parser.add_argument(
        "--with-optimizer", action="store_true", help="with --from: take the optimizer's state over as well"
    )
    add_rope_scaling(parser)
    parser.add_argument("--nproc", type=int, help="ranks to start on this machine (default: cluster.gpus)")
    parser.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="starts after failures of ranks (default 3)"
    )


def run(args: argparse.Namespace) -> int:
    refuse_too_small(args, {"threads": 1, "nproc": 1, "max_restarts": 0, "stop_at": 1})
    if args.with_optimizer and args.origin is None:
        raise UsageError("--with-optimizer goes with --from RUN")
    if Path(args.plan).is_dir():  # a run goes on by its own plan
        args.run, args.plan = args.run or Path(args.plan), str(Path(args.plan) / "plan.toml")
    sleep_while_waiting(os.environ)
    try:
        place = rank_environment(os.environ)
        if place is None or place.size == 1:
            return _run(args, place)
        return _run_as_rank(args, place)
    except KeyboardInterrupt:
        write_and_flush(sys.stderr, stop_message(signal.SIGINT))
        return _INTERRUPTED


def _run_as_rank(args: argparse.Namespace, place: RankEnvironment) -> int:
    """A rank leaves without tearing Python down.

    Peers wait for a rank that failed, and a broken process group may hang on its way out. In one that ended well, a
    thread of gloo may let go of its last tensor while the interpreter goes, which aborts the process.
    """
    try:
        code = _run(args, place)
    except FindingsError as error:
        code = print_findings(error.findings, args.json)
    except KeyboardInterrupt:  # whoever started the ranks says it
        code = _INTERRUPTED
    except Exception as error:
        code = _say_fault(place, error)
    if code == 0 and args.profile:  # Nsight Systems writes what it has seen at a regular exit
        return 0
    for out in (sys.stdout, sys.stderr):
        write_and_flush(out, "")
    os._exit(REFUSED if code == 1 else code)


def _say_fault(place: RankEnvironment, error: Exception) -> int:
    from threefold.engine.dist.join import is_lost_peer_error

    if is_lost_peer_error(error):
        write_and_flush(sys.stderr, f"rank {place.rank} lost a rank it was talking to: {str(error).splitlines()[0]}\n")
        return LOST_PEER
    write_and_flush(sys.stderr, traceback.format_exc())
    return FAULT


def _run(args: argparse.Namespace, place: RankEnvironment | None) -> int:
    parsed, findings = plan_from(args)
    given = parsed.plan
    if given is None:
        return print_findings(findings, args.json)
    if args.rope_scaling is not None:
        given = _stretched(args, given)
    ranks = place.size if place else args.nproc or given.cluster.gpus
    plan = plan_on_ranks(given, ranks)
    blocking = training_errors(plan)
    if place.rank == 0 if place else ranks == 1 or blocking:  # an agent leaves it to its first rank
        _say_changes(given, plan)
    if blocking:
        return print_findings(blocking, args.json)
    # The plan's own hash, whatever the ranks of today and its stack: a run goes on in its folder.
    folder = args.run or Path("runs") / f"{Path(args.plan).stem}-{given.hash}"
    try:
        return _train(args, plan, folder) if place or ranks == 1 else _start_ranks(args, plan, folder)
    except ModuleNotFoundError as error:
        return missing_package("train", error)


def _stretched(args: argparse.Namespace, plan: Plan) -> Plan:
    """The plan with a copy of its model's configuration whose positions reach its sequences, in the run's folder."""
    if args.run is None or not plan.model_name.startswith("hf:"):
        problem = "--rope-scaling changes the config.json of a model that is named hf:PATH, in the folder of --run"
        raise FindingsError([Finding(rule="context-fits-checkpoint", at="model", problem=problem, advice="name both")])
    path = Path(plan.model_name.removeprefix("hf:"))
    config = path / "config.json" if path.is_dir() else path
    longer = write_longer_config(config, args.run, plan.job.seq_len, args.rope_scaling)
    args.overrides = [*args.overrides, f"model={json.dumps(f'hf:{longer.resolve()}')}"]
    return change(plan, {"model": f"hf:{longer.resolve()}"})


def _say_changes(given: Plan, plan: Plan) -> None:
    if plan.target != given.target:
        write_and_flush(sys.stderr, f"target: {given.target}; it is this engine that trains\n")
    if plan.cluster.gpus != given.cluster.gpus:
        write_and_flush(
            sys.stderr, f"on {format_many(plan.cluster.gpus, 'rank')}, where the plan says {given.cluster.gpus}\n"
        )


def _train(args: argparse.Namespace, plan: Plan, folder: Path) -> int:
    profiler = args.profile_with if args.profile else None
    step, is_leader = train_rank(plan, folder, args.threads, args.stop_at, profiler, args.origin, args.with_optimizer)
    if is_leader:
        for finding in health_of_run(folder):
            write_and_flush(sys.stderr, f"{finding}\n")
        facts = {"ok": True, "run": str(folder), "step": step, "steps": plan.job.steps}
        said = json.dumps(facts) if args.json else f"{_outcome(step, plan.job.steps)}: {folder}"
        write_and_flush(sys.stdout, f"{said}\n")
    return 0


def _outcome(step: int, steps: int) -> str:
    if step > steps:
        return f"the run is at step {step} already, past job.steps = {steps}; nothing was done"
    return f"{'finished' if step == steps else 'stopped'} at step {step} of {steps}"


def _start_ranks(args: argparse.Namespace, plan: Plan, folder: Path) -> int:
    """This command again, once a rank."""
    words = [args.plan, *args.overrides, "--run", str(folder)]
    words += ["--threads", str(args.threads)] if args.threads else []
    words += ["--stop-at", str(args.stop_at)] if args.stop_at else []
    words += ["--profile", "--profile-with", args.profile_with] if args.profile else []
    words += ["--from", str(args.origin)] if args.origin else []
    words += ["--with-optimizer"] if args.with_optimizer else []
    words += ["--target", args.target] if args.target else []
    words += ["--json"] if args.json else []
    return start_ranks(plan, folder, words, args.max_restarts)
