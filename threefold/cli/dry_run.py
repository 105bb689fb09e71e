"""`threefold dry-run`: the engine on any rank of a plan, without the cluster."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.api.rehearsals import as_the_engine_runs, loads_from, predicted_snapshot, rehearse
from threefold.cli.command_line.inputs import add_plan_arguments, the_plan
from threefold.cli.command_line.out import UsageError, is_written, print_json
from threefold.cli.command_line.rehearse import end_progress, progress
from threefold.rules.all import errors

if TYPE_CHECKING:
    from threefold.dryrun.measured.measure import Measurement
    from threefold.dryrun.rehearse_plan import Rehearsal
    from threefold.dryrun.rehearse_rank import RankRehearsal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument(
        "--ranks",
        default="stages",
        help="ranks such as 0,8,16; stages: one of every distinct stage (default); "
        "all: every rank, of a plan scaled down to 32 at most, and whether their collectives match",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: run the rank and measure it")
    parser.add_argument(
        "--skew", type=float, default=1.0, metavar="X", help="load of the busiest expert rank over the mean (default 1)"
    )
    parser.add_argument(
        "--loads", metavar="FILE", help="tokens of each expert: a JSON list, one a layer, or the folder of a run"
    )
    parser.add_argument(
        "--load", metavar="NAME", help="draw how tokens fall on the experts: job.load for this rehearsal"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="ranks rehearsed at a time (default: one a core)")
    parser.add_argument("--timeline", metavar="FILE", help="write live bytes over the step (JSON)")
    parser.add_argument("--plot", metavar="FILE", help="draw them")
    parser.add_argument(
        "--snapshot", metavar="FILE", help="write the largest rank's allocations for PyTorch's memory viewer (.pickle)"
    )


def run(args: argparse.Namespace) -> int:
    ranks = _ranks(args.ranks)
    if ranks is None:
        raise UsageError(f"--ranks {args.ranks!r} is neither numbers nor stages nor all")
    if not math.isfinite(args.skew) or (args.jobs is not None and args.jobs < 1):
        raise UsageError("--skew and --jobs are numbers of at least 1")
    if args.load is not None:
        args.overrides = [*args.overrides, f"job.load={args.load}"]
    given = the_plan(args)
    try:
        plan, left_out = as_the_engine_runs(given)
        loads, problem = loads_from(args.loads, args.skew, plan)
        if problem:
            raise UsageError(problem)
        if args.device == "cuda":
            from threefold.dryrun.measured.measure import measure

            return _tell_measured(args, measure(plan, _one(ranks), loads, left_out, progress()))
        found = rehearse(given, ranks, loads=loads, jobs=args.jobs, say=progress())
        told = _tell(args, found)
        if args.snapshot:
            content = predicted_snapshot(found, loads)
            told = told if is_written("dry-run", args.snapshot, lambda: Path(args.snapshot).write_bytes(content)) else 1
        return told
    finally:
        end_progress()


def _ranks(text: str) -> list[int] | str | None:
    if text in ("stages", "all"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return None


def _one(ranks: list[int] | str) -> int:
    return 0 if isinstance(ranks, str) else ranks[0]


def _tell_measured(args: argparse.Namespace, found: "Measurement") -> int:
    from threefold.report.rehearsal import measured_text

    end_progress()
    print(json.dumps(found.to_json(), indent=2) if args.json else measured_text(found))
    return 0


def _tell(args: argparse.Namespace, found: "Rehearsal") -> int:
    from threefold.report.rehearsal import rehearsal_text

    end_progress()
    if args.json:
        print_json(found.to_json())
    else:
        print(rehearsal_text(found))
    written = not args.timeline or is_written("dry-run", args.timeline, lambda: _write_timeline(found, args.timeline))
    drawn = not args.plot or is_written("dry-run", args.plot, lambda: _plot(found, args.plot))
    return 1 if errors(found.findings) or not (written and drawn) else 0


def _plot(found: "Rehearsal", path: str) -> None:
    from threefold.report.plots import plot_rehearsal

    plot_rehearsal(found, path)


def _write_timeline(found: "Rehearsal", path: str) -> None:
    Path(path).write_text(json.dumps([_line(rank) for rank in found.ranks]), encoding="utf-8")


def _line(rank: "RankRehearsal") -> dict[str, object]:
    return {"rank": rank.rank, "stage": rank.stage, "peak_bytes": rank.peak_bytes, "points": list(rank.timeline)}
