"""`threefold profile`: which wall a trace or a run stands at, and what to change."""

import argparse
import json
import math
from pathlib import Path

from threefold.api.comparisons import profile_run
from threefold.cli.command_line.inputs import print_findings
from threefold.cli.command_line.out import UsageError, is_written, print_json
from threefold.findings import in_order
from threefold.plan.file import read_plan
from threefold.plan.parse import free_findings
from threefold.profile.analyze import Profile
from threefold.report.profile import profile_text
from threefold.rules.all import errors

TRACE_SUFFIXES = (".json.gz", ".trace.json")
PICTURE_SUFFIXES = (".png", ".svg", ".pdf", ".html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE|RUN",
        help="PyTorch traces (.json, .json.gz), SQLite exports of Nsight Systems, or the folder of a run",
    )
    parser.add_argument("--plan", metavar="PLAN", help="the plan that ran; advice is then changes of its fields")
    parser.add_argument("--step", metavar="NAME", help="the range around a step (default: known names, else a kernel)")
    parser.add_argument(
        "--unprofiled",
        type=float,
        metavar="SECONDS",
        help="a step without the profiler, to say how much the profiler slows it (default: the run's own log)",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="also write the answer: .json, an annotated trace for Perfetto (.json.gz, .trace.json), "
        "or a picture (.png, .svg, .pdf, .html)",
    )


def run(args: argparse.Namespace) -> int:
    out = args.out
    if out is not None and not out.endswith((".json", *TRACE_SUFFIXES, *PICTURE_SUFFIXES)):
        known = ", ".join((".json", *TRACE_SUFFIXES, *PICTURE_SUFFIXES))
        raise UsageError(f"--out {out} ends in none of {known}")
    if args.unprofiled is not None and not 0 < args.unprofiled < math.inf:
        raise UsageError("--unprofiled is a number of seconds above 0")
    plan = None
    if args.plan:
        parsed = read_plan(args.plan)
        plan = parsed.plan
        if plan is None or errors(parsed.findings):
            return print_findings(in_order([*parsed.findings, *free_findings(parsed.free)]), args.json)
    found = profile_run(*args.traces, plan=plan, step_range=args.step, unprofiled_seconds=args.unprofiled)
    written = out is None or is_written("profile", out, lambda: _write(found, out))
    if args.json:
        print_json(found.to_json())
    else:
        print(profile_text(found))
    return 0 if written else 1


def _write(found: Profile, path: str) -> None:
    if path.endswith(TRACE_SUFFIXES):
        from threefold.report.profile_trace import write_annotated_trace

        write_annotated_trace(found, Path(path))
    elif path.endswith(PICTURE_SUFFIXES):
        from threefold.report.plots import write_picture

        write_picture(found, Path(path))
    else:
        Path(path).write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
