"""`threefold plan`: from a question to a plan, by search."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from threefold.api.searches import find_plan, with_defaults
from threefold.cli.command_line.inputs import add_chip_file, add_like, add_plan_arguments, print_findings
from threefold.cli.command_line.out import UsageError, is_written, print_json
from threefold.cli.command_line.rehearse import Rehearsed, rehearse_first, rehearsed_text
from threefold.cost.chip_file import read_chip_file
from threefold.findings import Finding, in_order
from threefold.machine.own_chip_file import NO_CHIP_FILE
from threefold.plan.file import dump_plan, parse_overrides, read_plan
from threefold.plan.parse import Fields, normalize
from threefold.plan.plan import Plan
from threefold.plan.table import AUTO
from threefold.report.search import search_summary, search_text
from threefold.rules.all import errors
from threefold.search.search import SearchResult

FLAGS = {
    "model": "model",
    "chip": "cluster.chip",
    "gpus": "cluster.gpus",
    "seq_len": "job.seq_len",
    "global_batch": "job.global_batch",
    "micro_batch": "job.micro_batch",
    "precision": "knobs.precision",
    "target": "target",
}
NEEDED = ("model", "chip", "gpus", "seq_len")
# What a reader of a plan asks first: always in the file that is written, also at its default.
STATED = (
    *("target", "cluster.chip", "cluster.gpus", "job.seq_len", "job.global_batch", "job.micro_batch"),
    *(f"layout.{axis}" for axis in ("tp", "cp", "pp", "vpp", "ep", "etp")),
    "knobs.precision",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(
        parser,
        optional=True,
        target="plan for this stack (default: threefold where our engine trains the model, else megatron-bridge)",
    )
    parser.add_argument("--model", metavar="M", help="a model name, or hf:path of a config.json")
    parser.add_argument("--chip", metavar="C", help="a chip name (default: that of --chip-file)")
    add_chip_file(parser)
    add_like(parser)
    parser.add_argument("--gpus", metavar="N", type=_count, help="GPUs in all, or auto for as few as work")
    parser.add_argument("--seq-len", metavar="S", type=_tokens, help="tokens in a sequence, such as 4096 or 32K")
    parser.add_argument(
        "--global-batch", metavar="B", type=int, help="sequences a step (default: 4M tokens, 16M from 128 GPUs)"
    )
    parser.add_argument("--micro-batch", metavar="m", type=int, help="sequences in a microbatch (default: searched)")
    parser.add_argument(
        "--precision", metavar="P", help="a format, or auto: the faster of the platform's and bf16 (default auto)"
    )
    parser.add_argument("--top", metavar="K", type=int, default=5, help="candidates to show (default 5)")
    parser.add_argument(
        "--rehearse",
        metavar="K",
        type=int,
        default=0,
        help="run the first K candidates without the cluster, rank again",
    )
    parser.add_argument("--pick", metavar="N", type=int, default=1, help="the candidate that --out writes (default 1)")
    parser.add_argument("--details", action="store_true", help="all of the answer, not its 60 lines")
    parser.add_argument("--out", metavar="FILE", help="write the first candidate, or that of --pick (TOML)")


def run(args: argparse.Namespace) -> int:
    if args.top < 1 or args.rehearse < 0 or args.pick < 1:
        raise UsageError("--top, --pick and --rehearse count candidates")
    args.top = max(args.top, args.pick)
    if args.plan and "=" in args.plan and not Path(args.plan).exists():
        args.plan, args.overrides = None, [args.plan, *args.overrides]
    is_given = args.chip_file not in (None, NO_CHIP_FILE)
    chip_file, unread = read_chip_file(args.chip_file) if is_given else (None, [])
    if unread:
        return print_findings(in_order(unread), args.json)
    if chip_file and args.plan is None:
        args.chip = args.chip or chip_file.spec.plan_name
    missing = [f"--{name.replace('_', '-')}" for name in NEEDED if getattr(args, name) is None]
    if args.plan is None and missing:
        raise UsageError(f"give a draft file, or {', '.join(missing)}")
    fields, findings = _draft(args)
    if errors(findings):
        return print_findings(in_order(findings), args.json)
    fields, why = with_defaults(fields)
    try:
        found = find_plan(fields, args.top, args.chip_file, _progress if sys.stderr.isatty() else None, args.like)
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
    ordered, seen = rehearse_first(found.candidates, args.rehearse) if args.rehearse else ([], [])
    return _tell(args, replace(found, candidates=tuple(ordered)) if seen else found, seen, why)


def _count(text: str) -> int | str:
    return AUTO if text == AUTO else int(text)


def _tokens(text: str) -> int | str:
    """A number, or what a plan file may say instead, such as 32K."""
    return int(text) if text.isdecimal() else text


def _draft(args: argparse.Namespace) -> tuple[Fields, list[Finding]]:
    """The fields of the draft, the flags and the overrides, with the defaults of this verb."""
    said = {path: getattr(args, name) for name, path in FLAGS.items()}
    flags, wrong = normalize({path: value for path, value in said.items() if value is not None})
    if args.plan is not None:
        parsed = read_plan(args.plan, args.overrides)
        fields = {**parsed.fields, **dict.fromkeys(parsed.free, AUTO), **flags}
        findings = [*parsed.findings, *wrong]
    else:
        overrides, bad = parse_overrides(args.overrides)
        given, more = normalize({path: value for path, value in overrides.items() if value is not None})  # null: free
        fields, findings = {**flags, **given}, [*wrong, *bad, *more]
    return fields, findings


def _progress(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _tell(args: argparse.Namespace, found: SearchResult, seen: Sequence[Rehearsed], why: str) -> int:
    code = 0 if found.candidates else 1
    if found.candidates and args.pick > len(found.candidates):
        raise UsageError(f"--pick {args.pick} of {len(found.candidates)} candidates")
    picked = found.candidates[args.pick - 1].plan if found.candidates else None
    if args.out and picked:
        text = dump_plan(picked, stating=STATED)
        code = 0 if is_written("plan", args.out, lambda: Path(args.out).write_text(text, encoding="utf-8")) else 1
    if args.json:
        said: dict[str, Any] = {"summary": search_summary(found, why), **found.to_json()}
        said |= {"target_because": why} if why else {}
        said |= {"rehearsed": [one.to_json() for one in seen]} if seen else {}
        print_json(said)
    else:
        print(search_text(found, why, args.details))
        if seen:
            print(f"\n{rehearsed_text(seen, found.candidates)}")
        if picked and code == 0:
            print(f"\n{_next_command(args.out, args.pick, picked, args.plan)}")
    return code


def _next_command(out: str | None, pick: int, plan: Plan, draft: str | None = None) -> str:
    """What to do with the plan that is picked."""
    name = "plan.toml" if Path(draft or "").name != "plan.toml" else "better.toml"  # the draft stays as it is
    flags = f"--out {name}" if pick == 1 else f"--pick {pick} --out {name}"
    wrote = f"wrote candidate {pick} to {out}; next:" if out else f"next: the same with {flags}, then"
    file = out or name
    if plan.target == "threefold":
        return f"{wrote}\n`threefold dry-run {file}` rehearses it\n`threefold train {file}` or `launch {file}` run it"
    return f"{wrote}\n`threefold export {file} --out export` writes what {plan.target} runs"
